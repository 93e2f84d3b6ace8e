//! Name servers: passed through to the result, since the runtime writes the container's `resolv.conf`.

use serde_json::{Map, Value};

use crate::{error::Error, section::Section};

/// As in a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Dns {
    nameservers: Vec<String>,
    domain: Option<String>,
    search: Vec<String>,
    options: Vec<String>,
}

impl Dns {
    /// Reads `dns` of the network.
    pub(super) fn parse(whole: &mut Section) -> Result<Self, Error> {
        let mut section = whole.section("dns")?;
        let dns = Self {
            nameservers: section.texts("nameservers")?,
            domain: section.text("domain")?,
            search: section.texts("search")?,
            options: section.texts("options")?,
        };
        section.finish("`dns` has nameservers, domain, search and options")?;
        Ok(dns)
    }

    /// Reads the capability `dns`, which goes before what the network says, list by list.
    pub(super) fn overlay(&mut self, mut section: Section) -> Result<(), Error> {
        for (key, list) in [
            ("servers", &mut self.nameservers),
            ("searches", &mut self.search),
            ("options", &mut self.options),
        ] {
            let given = section.texts(key)?;
            if !given.is_empty() {
                *list = given;
            }
        }
        section.finish("the capability `dns` has servers, searches and options")
    }

    pub(super) fn into_result(self) -> Map<String, Value> {
        let lists = [
            ("nameservers", self.nameservers),
            ("search", self.search),
            ("options", self.options),
        ];
        let lists = lists.into_iter().filter(|(_, list)| !list.is_empty());
        let mut result: Map<String, Value> = lists
            .map(|(key, list)| (key.to_owned(), Value::from(list)))
            .collect();
        if let Some(domain) = self.domain {
            result.insert("domain".to_owned(), Value::from(domain));
        }
        result
    }
}
