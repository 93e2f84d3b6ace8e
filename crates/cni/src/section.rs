//! An object of the configuration whose keys are taken one by one; what is left at the end is unknown.
//!
//! A `null` counts as absent: that is how Go writes an empty list or pointer. What a runtime makes up itself is
//! [without case](Section::without_case): Go reads it so, and containerd writes its own names of fields, as `HostPort`.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::error::Error;

/// What is left of an object, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    /// Place in the configuration, with a point at its end unless it is the whole.
    path: String,
    keys: Map<String, Value>,
    is_without_case: bool,
}

impl Section {
    /// The whole configuration.
    pub(crate) fn whole(keys: &Map<String, Value>) -> Self {
        Self {
            path: String::new(),
            keys: keys.clone(),
            is_without_case: false,
        }
    }

    /// Takes keys in whatever case they are written, and so of all that is below.
    pub(crate) fn without_case(mut self) -> Self {
        self.is_without_case = true;
        self
    }

    /// The place of a key, for messages.
    pub(crate) fn place(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    pub(crate) fn value(&mut self, key: &str) -> Option<Value> {
        let found = self.keys.remove(key).or_else(|| {
            let mut written = self.keys.keys();
            let same = written.find(|written| written.eq_ignore_ascii_case(key))?;
            let same = self.is_without_case.then(|| same.clone())?;
            self.keys.remove(&same)
        });
        found.filter(|value| !value.is_null())
    }

    pub(crate) fn text(&mut self, key: &str) -> Result<Option<String>, Error> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, &other, "a text")),
        }
    }

    pub(crate) fn number<N: TryFrom<u64>>(&mut self, key: &str) -> Result<Option<N>, Error> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| N::try_from(number).ok());
        number.map_or_else(
            || Err(self.wrong(key, &value, "a whole number in its range")),
            |number| Ok(Some(number)),
        )
    }

    /// A text that has a form of its own.
    pub(crate) fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(
        &mut self,
        key: &str,
    ) -> Result<Option<T>, Error> {
        let Some(text) = self.text(key)? else {
            return Ok(None);
        };
        let parsed = text
            .parse()
            .map_err(|error: T::Err| self.invalid(key, error));
        parsed.map(Some)
    }

    /// A prefix without bits beyond its length.
    pub(crate) fn prefix(&mut self, key: &str) -> Result<Option<IpNet>, Error> {
        let Some(prefix) = self.parsed::<IpNet>(key)? else {
            return Ok(None);
        };
        if prefix != prefix.trunc() {
            let reason = format!(
                "{prefix} has bits beyond its length; it is {}",
                prefix.trunc()
            );
            return Err(self.invalid(key, reason));
        }
        Ok(Some(prefix))
    }

    pub(crate) fn list(&mut self, key: &str) -> Result<Vec<Value>, Error> {
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => Ok(list),
            Some(other) => Err(self.wrong(key, &other, "a list")),
        }
    }

    pub(crate) fn texts(&mut self, key: &str) -> Result<Vec<String>, Error> {
        let list = self.list(key)?.into_iter().enumerate();
        list.map(|(index, value)| match value {
            Value::String(text) => Ok(text),
            other => Err(self.wrong(&format!("{key}[{index}]"), &other, "a text")),
        })
        .collect()
    }

    /// An object below a key, or an empty one.
    pub(crate) fn section(&mut self, key: &str) -> Result<Self, Error> {
        let value = self.value(key).unwrap_or_else(|| Value::Object(Map::new()));
        self.below(key, value)
    }

    /// The objects of a list.
    pub(crate) fn sections(&mut self, key: &str) -> Result<Vec<Self>, Error> {
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(list) => self.objects(key, list),
        }
    }

    /// The objects of a list that has been taken from a key of this one.
    pub(crate) fn objects(&self, key: &str, list: Value) -> Result<Vec<Self>, Error> {
        let Value::Array(list) = list else {
            return Err(self.wrong(key, &list, "a list"));
        };
        let list = list.into_iter().enumerate();
        list.map(|(index, value)| self.below(&format!("{key}[{index}]"), value))
            .collect()
    }

    /// An object that stands at a key of this one.
    pub(crate) fn below(&self, key: &str, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(keys) => Ok(Self {
                path: format!("{}.", self.place(key)),
                keys,
                is_without_case: self.is_without_case,
            }),
            other => Err(self.wrong(key, &other, "an object")),
        }
    }

    /// Takes what is of no concern to this plugin.
    pub(crate) fn ignore(&mut self, keys: &[&str]) {
        for key in keys {
            self.keys.remove(*key);
        }
    }

    /// Takes what is an empty text, as Go writes one that isn't set.
    pub(crate) fn ignore_empty(&mut self, keys: &[&str]) {
        self.keys.retain(|written, value| {
            let is_one = keys.iter().any(|key| written.eq_ignore_ascii_case(key));
            !is_one || value != ""
        });
    }

    /// Takes the keys that begin so.
    pub(crate) fn ignore_prefix(&mut self, prefix: &str) {
        self.keys.retain(|key, _| !key.starts_with(prefix));
    }

    /// Wants nothing to be left.
    pub(crate) fn finish(self, reason: &str) -> Result<(), Error> {
        let left = self.keys.iter().find(|(_, value)| !value.is_null());
        match left {
            None => Ok(()),
            Some((key, value)) => Err(self.unsupported(key, value, reason)),
        }
    }

    pub(crate) fn invalid(&self, key: &str, reason: impl std::fmt::Display) -> Error {
        Error::InvalidConfig {
            key: self.place(key),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, value: &Value, reason: &str) -> Error {
        Error::UnsupportedField {
            key: self.place(&shortened(key)),
            value: shortened(&value.to_string()),
            reason: reason.to_owned(),
        }
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> Error {
        let value = shortened(&value.to_string());
        self.invalid(key, format!("{value} is not {wanted}"))
    }
}

fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 200;
    if text.chars().count() <= CHARACTERS_MAX {
        return text.to_owned();
    }
    let start: String = text.chars().take(CHARACTERS_MAX).collect();
    format!("{start}…")
}
