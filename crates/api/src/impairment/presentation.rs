//! How impairments look in JSON, TOML and the OpenAPI document: a text, or a table of the same settings.

use std::{fmt, marker::PhantomData, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, OneOfBuilder, RefOr, Schema, Type},
};

use super::{
    Protocol,
    models::{
        Corrupt, Delay, Flap, Loss, LossKind, LossTable, Mtu, NatRebind, Rate, Reorder, Trace,
    },
};

/// Reads a text with `FromStr`, a whole number as its digits, and a table with `T`.
struct TextOrTable<T, Table> {
    expected: &'static str,
    kinds: PhantomData<(T, Table)>,
}

impl<T, Table> TextOrTable<T, Table> {
    fn new(expected: &'static str) -> Self {
        Self {
            expected,
            kinds: PhantomData,
        }
    }
}

/// A type that is read as a table and becomes a `T`.
trait ReadTable<T> {
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error>;
}

impl<'de, T, Table> Visitor<'de> for TextOrTable<T, Table>
where
    T: FromStr<Err: fmt::Display>,
    Table: ReadTable<T>,
{
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a text such as \"{}\", or a table", self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        Table::read(MapAccessDeserializer::new(map))
    }
}

/// For a type whose table serde has derived: a text if that says all, else the table.
macro_rules! text_or_table {
    ($($type:ident, $schema:ident, $example:literal, |$value:ident| $is_text:expr;)*) => {$(
        impl ReadTable<$type> for $type {
            fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                $type::deserialize(deserializer)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(TextOrTable::<$type, $type>::new($example))
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $value = self;
                if $is_text {
                    serializer.collect_str(self)
                } else {
                    $type::serialize(self, serializer)
                }
            }
        }

        /// Of the field in the OpenAPI document.
        pub(super) fn $schema() -> RefOr<Schema> {
            text_or(<$type as PartialSchema>::schema(), $example)
        }
    )*};
}

text_or_table! {
    Delay, delay, "50ms", |value| *value == Delay { mean: value.mean, ..Delay::default() };
    Rate, rate, "10mbit", |value| *value == Rate { rate: value.rate, ..Rate::default() };
    Trace, trace, "lte.trace", |value| {
        !value.file.is_empty() && *value == Trace { file: value.file.clone(), ..Trace::default() }
    };
    Reorder, reorder, "5% distance 3", |_value| false;
    Corrupt, corrupt, "0.1%", |value| {
        *value == Corrupt { share: value.share, bits: 1, ..Corrupt::default() }
    };
    Flap, flap, "up 10s down 1s", |_value| false;
    Mtu, mtu, "1400", |value| value.icmp && value.fragment;
    NatRebind, nat_rebind, "30s", |value| {
        *value == NatRebind { every: value.every, ..NatRebind::default() } && value.every.is_some()
    };
}

/// Of the field in the OpenAPI document.
pub(super) fn loss() -> RefOr<Schema> {
    text_or(LossTable::schema(), "1%")
}

impl ReadTable<Loss> for LossTable {
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Loss, D::Error> {
        let table = LossTable::deserialize(deserializer)?;
        Loss::try_from(table).map_err(de::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Loss {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrTable::<Loss, LossTable>::new("1%"))
    }
}

impl Serialize for Loss {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Independent { share } => share.serialize(serializer),
            other => LossTable::from(other.clone()).serialize(serializer),
        }
    }
}

impl fmt::Display for LossKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Independent => "independent",
            Self::GilbertElliott => "gilbert-elliott",
            Self::FourState => "4-state",
            Self::Packets => "packets",
        })
    }
}

/// Why a text is no [`Protocol`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no protocol: write tcp, udp, icmp, or a number from 0 to 255")]
pub struct InvalidProtocol {
    text: String,
}

impl FromStr for Protocol {
    type Err = InvalidProtocol;

    fn from_str(text: &str) -> Result<Self, InvalidProtocol> {
        match text {
            "tcp" => Ok(Self::Tcp),
            "udp" => Ok(Self::Udp),
            "icmp" => Ok(Self::Icmp),
            _ => text.parse().map(Self::Number).map_err(|_| InvalidProtocol {
                text: text.chars().take(40).collect(),
            }),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Udp => f.write_str("udp"),
            Self::Icmp => f.write_str("icmp"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

impl Serialize for Protocol {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl ReadTable<Protocol> for Protocol {
    fn read<'de, D: Deserializer<'de>>(_: D) -> Result<Protocol, D::Error> {
        Err(de::Error::custom(
            "a protocol is a text or a number, not a table",
        ))
    }
}

impl<'de> Deserialize<'de> for Protocol {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrTable::<Protocol, Protocol>::new("udp"))
    }
}

impl PartialSchema for Protocol {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some("^(tcp|udp|icmp|[0-9]{1,3})$"))
            .examples(["udp"])
            .into()
    }
}

impl ToSchema for Protocol {}

/// Reads a prefix, or an address, which is a prefix of all its bits.
pub(super) fn network<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IpNet>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    network_of(&text).map(Some).map_err(de::Error::custom)
}

/// A prefix, or an address, which is a prefix of all its bits.
pub(super) fn network_of(text: &str) -> Result<IpNet, InvalidNetwork> {
    let address = text.parse::<IpAddr>().map(IpNet::from).ok();
    let network = address.or_else(|| text.parse().ok());
    network.ok_or_else(|| InvalidNetwork {
        text: text.chars().take(60).collect(),
    })
}

/// Why a text is no prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is neither an address nor a prefix: write 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32"
)]
pub(super) struct InvalidNetwork {
    text: String,
}

fn text_or(table: RefOr<Schema>, example: &str) -> RefOr<Schema> {
    let text = ObjectBuilder::new()
        .schema_type(Type::String)
        .examples([example]);
    OneOfBuilder::new().item(text).item(table).into()
}
