//! Says what a file shows, and resizes its first frame to multiples of 32 pixels:
//! `cargo run -p media --example resize -- PICTURE`.

use media::{Limits, decode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("name a picture")?;
    let frame = decode(std::fs::read(path)?, &Limits::default())?;
    let (height, width) = (frame.height(), frame.width());
    println!("{height}x{width}");
    let near = |side: usize| (side / 32).max(1) * 32;
    let small = frame.resized(near(height), near(width));
    println!("resized to {}x{}", small.height(), small.width());
    Ok(())
}
