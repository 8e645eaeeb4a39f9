//! llama.cpp's grammar language.
use crate::{Error, Limits};
pub(crate) fn to_lark(_text: &str, _limits: &Limits) -> Result<String, Error> {
    Err(Error::Invalid {
        what: "GBNF grammar",
        reason: "it is not supported yet".to_owned(),
    })
}
