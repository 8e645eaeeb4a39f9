//! Fetches one file and says how large it is, or why it may not be fetched:
//! `cargo run -p fetch --example get -- https://example.org/`

use fetch::{Fetcher, Hosts};
use std::time::{Duration, Instant};

fn main() {
    let url = std::env::args().nth(1).expect("an address");
    let fetcher = Fetcher::new(Hosts::parse(["*"]).expect("any host"));
    let until = Instant::now() + Duration::from_secs(10);
    match fetcher.get(&url, 16 << 20, until) {
        Ok(bytes) => println!("{} bytes", bytes.len()),
        Err(error) => println!("the file {error}"),
    }
}
