//! The values of `format` that are enforced.
//!
//! Each is a regular expression for a strict form of its standard: what it matches is valid,
//! and a few rare valid spellings are left out.
//!
//! | format | standard | left out |
//! | --- | --- | --- |
//! | `date-time`, `date`, `time` | RFC 3339 | leap seconds, lower-case `t` and `z`, the year 0, which few programs read |
//! | `duration` | ISO 8601 as in RFC 3339, appendix A | |
//! | `email` | RFC 5321, mailbox | quoted local parts, address literals, parts over 64 characters |
//! | `hostname` | RFC 1123 | a last label of digits, a name over 253 characters |
//! | `ipv4`, `ipv6` | RFC 2673, RFC 4291 | IPv4 at the end of IPv6 |
//! | `uuid` | RFC 4122 | |
//! | `uri` | RFC 3986 | addresses of IPv6 and later as a host |
//! | `json-pointer` | RFC 6901 | |
//! | `int32`, `int64`, `float`, `double` | OpenAPI | integers of more than 53 bits |
//! | `password`, `binary`, `byte` | OpenAPI | (they are any string) |

/// Strings in base64 as in RFC 4648, padded.
pub(super) const BASE64: &str =
    r"(?:[A-Za-z0-9+\x{2F}]{4})*(?:[A-Za-z0-9+\x{2F}]{2}==|[A-Za-z0-9+\x{2F}]{3}=)?";

/// How a format is enforced.
pub(super) enum Format {
    /// The string matches this from start to end.
    Pattern(&'static str),
    /// The string matches the pattern from start to end and has at most so many characters.
    Length(&'static str, u32),
    /// The number is between these two.
    Range(i64, i64),
    /// The format says nothing about the value.
    Anything,
}

/// Days of all years from 1 on; then 29 February of leap years: those divisible by 4 that do not end in
/// 00, and those that end in 00 whose first two digits are divisible by 4.
macro_rules! date {
    () => {
        "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
    };
}

macro_rules! time {
    () => {
        r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    };
}

macro_rules! label {
    () => {
        "[a-zA-Z0-9](?:[a-zA-Z0-9\\-]{0,61}[a-zA-Z0-9])?"
    };
}

/// A host name whose last label begins with a letter, so that it is no address. No label has
/// hyphens in its third and fourth place, which would promise another encoding.
macro_rules! host {
    () => {
        concat!(
            "(?:[a-zA-Z0-9]{1,2}|[a-zA-Z0-9][a-zA-Z0-9\\-][a-zA-Z0-9](?:[a-zA-Z0-9\\-]{0,59}[a-zA-Z0-9])?)",
            "(?:\\.(?:[a-zA-Z0-9]{1,2}|[a-zA-Z0-9][a-zA-Z0-9\\-][a-zA-Z0-9](?:[a-zA-Z0-9\\-]{0,59}[a-zA-Z0-9])?))*"
        )
    };
}

macro_rules! ipv4 {
    () => {
        r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    };
}

/// Characters of a path of a URI.
macro_rules! pchar {
    () => {
        r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
    };
}

/// How the format `name` is enforced; `None` if it is not known.
pub(super) fn lookup(name: &str) -> Option<Format> {
    let format = match name {
        "date-time" => Format::Pattern(concat!(date!(), "T", time!())),
        "date" => Format::Pattern(date!()),
        "time" => Format::Pattern(time!()),
        "duration" => Format::Pattern(concat!(
            "P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)",
            "(?:T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))?",
            "|T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))"
        )),
        "email" => Format::Length(
            concat!(
                r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]{1,30}(?:\.[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]{1,10}){0,3}@",
                label!(),
                r"(?:\.",
                label!(),
                ")*"
            ),
            254,
        ),
        "hostname" => Format::Length(host!(), 253),
        "ipv4" => Format::Pattern(ipv4!()),
        "ipv6" => Format::Pattern(concat!(
            "(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,7}:",
            "|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,5}(?::[0-9a-fA-F]{1,4}){1,2}",
            "|(?:[0-9a-fA-F]{1,4}:){1,4}(?::[0-9a-fA-F]{1,4}){1,3}",
            "|(?:[0-9a-fA-F]{1,4}:){1,3}(?::[0-9a-fA-F]{1,4}){1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,2}(?::[0-9a-fA-F]{1,4}){1,5}",
            "|[0-9a-fA-F]{1,4}:(?::[0-9a-fA-F]{1,4}){1,6}",
            "|:(?::[0-9a-fA-F]{1,4}){1,7}|::"
        )),
        "uuid" => Format::Pattern(
            "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        ),
        "uri" => Format::Pattern(concat!(
            r"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://",
            r"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*@)?",
            r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})*(?::[0-9]{0,5})?(?:/",
            pchar!(),
            "*)*|/(?:",
            pchar!(),
            "+(?:/",
            pchar!(),
            "*)*)?|",
            pchar!(),
            "+(?:/",
            pchar!(),
            r"*)*)(?:\?(?:",
            pchar!(),
            r"|[/?])*)?(?:\x{23}(?:",
            pchar!(),
            "|[/?])*)?"
        )),
        "json-pointer" => Format::Pattern(r"(?:/(?:[^~/]|~[01])*)*"),
        "int32" => Format::Range(i64::from(i32::MIN), i64::from(i32::MAX)),
        "int64" => Format::Range(-9_007_199_254_740_991, 9_007_199_254_740_991),
        "float" | "double" | "password" | "binary" | "byte" => Format::Anything,
        _ => return None,
    };
    Some(format)
}
