//! Wanted fields of JSON from outside. The others are skipped and never kept, since a few
//! bytes of text become many in memory.

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Reads an object: hands the fields that are `wanted`, as `T`, to `take`.
pub(crate) struct Fields<T, W, F> {
    wanted: W,
    take: F,
    kind: PhantomData<fn() -> T>,
}

/// Hands the fields of the object `json` that are `wanted` to `take`, which may refuse with a
/// reason.
///
/// # Errors
///
/// If the text is not JSON, a wanted field is not a `T`, or `take` refuses.
pub(crate) fn fields<'t, T: Deserialize<'t>>(
    json: &'t [u8],
    wanted: impl Fn(&str) -> bool,
    take: impl FnMut(String, T) -> Result<(), String>,
) -> Result<(), serde_json::Error> {
    let mut text = serde_json::Deserializer::from_slice(json);
    Fields::new(wanted, take).deserialize(&mut text)?;
    text.end()
}

/// Hands the fields of the object `weight_map` in `json` that are `wanted` to `take`: the name
/// of a tensor and the file it is in.
///
/// # Errors
///
/// As [`fields`], and if there is no `weight_map`.
pub(crate) fn weight_map(
    json: &[u8],
    wanted: impl Fn(&str) -> bool,
    take: impl FnMut(String, String) -> Result<(), String>,
) -> Result<(), serde_json::Error> {
    let mut text = serde_json::Deserializer::from_slice(json);
    Within(Fields::new(wanted, take)).deserialize(&mut text)?;
    text.end()
}

impl<T, W, F> Fields<T, W, F> {
    fn new(wanted: W, take: F) -> Self {
        let kind = PhantomData;
        Fields { wanted, take, kind }
    }
}

impl<'de, T, W, F> DeserializeSeed<'de> for Fields<T, W, F>
where
    T: Deserialize<'de>,
    W: Fn(&str) -> bool,
    F: FnMut(String, T) -> Result<(), String>,
{
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, T, W, F> Visitor<'de> for Fields<T, W, F>
where
    T: Deserialize<'de>,
    W: Fn(&str) -> bool,
    F: FnMut(String, T) -> Result<(), String>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if (self.wanted)(&name) {
                (self.take)(name, map.next_value()?).map_err(Error::custom)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// Reads the field `weight_map` of an object.
struct Within<S>(S);

impl<'de, S: DeserializeSeed<'de, Value = ()>> DeserializeSeed<'de> for Within<S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, S: DeserializeSeed<'de, Value = ()>> Visitor<'de> for Within<S> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seed = Some(self.0);
        while let Some(name) = map.next_key::<String>()? {
            match seed.take_if(|_| name == "weight_map") {
                Some(seed) => map.next_value_seed(seed)?,
                None => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        match seed {
            None => Ok(()),
            Some(_) => Err(Error::missing_field("weight_map")),
        }
    }
}
