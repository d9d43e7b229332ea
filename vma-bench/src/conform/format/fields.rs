//! A JSON object with its fields in order, none of them twice.

use std::fmt::{self, Write as _};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};
use serde_json::Value;

/// The fields of an object. `serde_json` itself would keep the last of several fields of one name and say nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Fields(pub(super) Vec<(String, Value)>);

impl Fields {
    /// Takes a field out.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.remove(at).1)
    }

    /// The fields in the way that a call is told: `mmap addr=0 len=4096`. Strings, which are names and hex numbers,
    /// go without quotes.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        for (key, value) in &self.0 {
            let space = if out.is_empty() { "" } else { " " };
            // Writing to a string can't fail.
            let _ = match (key.as_str(), value) {
                ("op", Value::String(op)) => write!(out, "{space}{op}"),
                (key, Value::String(text)) => write!(out, "{space}{key}={text}"),
                (key, value) => write!(out, "{space}{key}={value}"),
            };
        }
        out
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if fields.0.iter().any(|(known, _)| *known == key) {
                return Err(A::Error::custom(format_args!("duplicate field `{key}`")));
            }
            fields.0.push((key, value));
        }
        Ok(fields)
    }
}
