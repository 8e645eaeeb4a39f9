//! Quantizes a model of the repository to 4 bits, as a folder of safetensors and as a
//! GGUF file, and reads both back:
//!
//! ```sh
//! cargo run -p convert --example quantize
//! ```

use convert::{ConvertError, Quantize, convert};
use std::path::Path;
use weights::Checkpoint;

fn main() -> Result<(), ConvertError> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen3.5");
    let source = Checkpoint::open(&source)?;
    let out = std::env::temp_dir().join(format!("convert-example-{}", std::process::id()));
    std::fs::create_dir_all(&out).expect("a temporary folder");

    let affine = Quantize::new(quant::format("affine4-g64").expect("a format of MLX"));
    let folder = out.join("four-bits");
    affine
        .apply(convert(&source)?)
        .write(&folder, &[], &mut |_, _| {})?;

    let blocks = Quantize::new(quant::format("q4_0").expect("a format of GGUF"));
    let file = out.join("four-bits.gguf");
    // A GGUF file that is to be run needs a vocabulary too (`vocabulary_keys`).
    blocks
        .apply(convert(&source)?)
        .write_gguf(&file, &[], &mut |_, _| {})?;

    println!("{:>9} bytes in the source", source.bytes());
    for path in [folder, file] {
        let written = Checkpoint::open(&path)?;
        println!("{:>9} bytes in {}", written.bytes(), path.display());
    }
    std::fs::remove_dir_all(&out).expect("what was written above");
    Ok(())
}
