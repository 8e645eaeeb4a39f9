//! `paceline convert`: what is written, in which formats and of what size.

use super::values::weight_format;
use ::convert::Pins;
use clap::{Args, ValueEnum};
use quant::Format;
use std::path::PathBuf;

/// `paceline convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// What to convert: a model as for -m
    #[arg(value_name = "SRC")]
    pub(crate) source: String,
    /// The folder or GGUF file to write; it must not exist
    pub(crate) out: PathBuf,
    /// Store matrices as FORMAT: q4, q5, q6, q8 (MLX's affine groups of 64), or a name such as
    /// affine4-g32, q4_0 or bf16
    #[arg(long, value_name = "FORMAT", value_parser = weight_format, help_heading = "Format")]
    pub(crate) quant: Option<&'static Format>,
    /// Store the tensors that PATTERN fits as FORMAT, or `stored` as they are; may be repeated, the
    /// first that fits counts
    #[arg(long, value_name = "PATTERN=FORMAT", value_parser = tensor_format, requires = "quant", help_heading = "Format")]
    pub(crate) tensor: Vec<TensorFormat>,
    /// Store matrices finer that need it most, in addition to --tensor: `mtp`, MTP heads as q8_0 and
    /// attention's queries and keys as q6_k; `udt`, embeddings, the output, values and dense down
    /// projections, too; `none`. `mtp` for tq3_1s and tq4_1s, else `none`
    #[arg(long, value_name = "SET", value_parser = pins, requires = "quant", help_heading = "Format")]
    pub(crate) pin: Option<Pins>,
    /// Kind of file: a folder of safetensors as MLX has it, or one GGUF file; gguf where OUT ends in
    /// .gguf, else safetensors
    #[arg(long, value_name = "KIND", help_heading = "Format")]
    pub(crate) format: Option<Container>,
    /// Take the tokenizer of a GGUF file from this model: a drafter has none of its own
    #[arg(long, value_name = "MODEL", help_heading = "Format")]
    pub(crate) tokenizer: Option<String>,
    /// Grow a small model and its drafter to the shapes of a model of this many weights, such as 2b,
    /// with the same text and acceptance: to measure speed
    #[arg(long, value_name = "SIZE", value_parser = parameters, help_heading = "Size")]
    pub(crate) inflate: Option<u64>,
    /// Layers of the grown model
    #[arg(long, value_name = "N", requires = "inflate", help_heading = "Size")]
    pub(crate) layers: Option<usize>,
    /// Vocabulary of the grown model
    #[arg(long, value_name = "N", requires = "inflate", help_heading = "Size")]
    pub(crate) vocab: Option<usize>,
    /// Write nothing but the MTP head
    #[arg(long, conflicts_with_all = ["inflate", "attach_head"], help_heading = "Head")]
    pub(crate) extract_head: bool,
    /// Put in the MTP head of this model
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "inflate",
        help_heading = "Head"
    )]
    pub(crate) attach_head: Option<String>,
    /// Write the model without its assistant, which otherwise goes to OUT-assistant
    #[arg(long, help_heading = "Head")]
    pub(crate) no_drafter: bool,
}

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Container {
    Safetensors,
    Gguf,
}

/// A pattern over tensor names and a format, none for "as stored".
pub(crate) type TensorFormat = (String, Option<&'static Format>);

fn tensor_format(text: &str) -> Result<TensorFormat, String> {
    let (pattern, format) = text
        .split_once('=')
        .ok_or("expected PATTERN=FORMAT, such as lm_head.*=q8")?;
    Ok((
        pattern.into(),
        if format == "stored" {
            None
        } else {
            Some(weight_format(format)?)
        },
    ))
}

fn pins(name: &str) -> Result<Pins, String> {
    Pins::named(name).ok_or_else(|| {
        let known = Pins::ALL
            .iter()
            .map(|pins| format!("{} ({})", pins.name, pins.about));
        format!("known are {}", known.collect::<Vec<_>>().join(", "))
    })
}

/// A number of weights such as `2b` or `800m`.
fn parameters(text: &str) -> Result<u64, String> {
    let split = text.len()
        - text
            .chars()
            .last()
            .filter(char::is_ascii_alphabetic)
            .map_or(0, |_| 1);
    let unit = match text[split..].to_ascii_lowercase().as_str() {
        "" => 1.0,
        "m" => 1e6,
        "b" => 1e9,
        _ => f64::NAN,
    };
    let number = text[..split].parse::<f64>().map_or(f64::NAN, |n| n * unit);
    (1.0..1e15)
        .contains(&number)
        .then_some(number as u64)
        .ok_or_else(|| "expected a number such as 2b or 800m".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_formats_have_short_names() {
        assert_eq!(parameters("2b"), Ok(2_000_000_000));
        assert_eq!(parameters("0.5B"), Ok(500_000_000));
        assert_eq!(parameters("40M"), Ok(40_000_000));
        for bad in ["", "b", "-1b", "1x", "nan", "1e30b", "2é"] {
            assert!(parameters(bad).is_err(), "{bad}");
        }
        assert_eq!(
            tensor_format("mtp.*=q8").unwrap().1.unwrap().name,
            "affine8-g64"
        );
        assert_eq!(
            tensor_format("lm_head.*=stored"),
            Ok(("lm_head.*".into(), None))
        );
        assert!(tensor_format("lm_head").is_err() && tensor_format("x=q7").is_err());
    }
}
