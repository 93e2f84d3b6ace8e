//! The mirror against what clang made of the header, as bpftool reads it.

use std::process::Command;

use serde_json::Value;

use super::*;
use crate::Refusal;

fn types() -> Vec<Value> {
    let objects = [
        concat!(env!("OUT_DIR"), "/identity.o"),
        concat!(env!("OUT_DIR"), "/open.o"),
    ];
    objects.into_iter().flat_map(types_of).collect()
}

fn types_of(object: &str) -> Vec<Value> {
    let output = Command::new("bpftool")
        .args(["--json", "btf", "dump", "file", object])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let dump: Value = serde_json::from_slice(&output.stdout).unwrap();
    dump["types"].as_array().unwrap().clone()
}

fn find<'a>(types: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = types
        .iter()
        .find(|found| found["kind"] == kind && found["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

#[test]
fn structs_are_laid_out_as_in_the_header() {
    let types = types();
    for (name, size, fields) in STRUCTS {
        let found = find(&types, "STRUCT", name);
        assert_eq!(number(&found["size"]), *size, "size of {name}");
        let members = found["members"].as_array().unwrap();
        let declared: Vec<(String, usize)> = members
            .iter()
            .map(|member| {
                let name = member["name"].as_str().unwrap().to_owned();
                (name, number(&member["bits_offset"]) / 8)
            })
            .collect();
        let mirrored: Vec<(String, usize)> = fields
            .iter()
            .map(|(name, place)| ((*name).to_owned(), place.offset))
            .collect();
        assert_eq!(declared, mirrored, "fields of {name}");
        // Without padding, a field ends where the next one begins.
        let ends = mirrored.iter().skip(1).map(|(_, offset)| *offset);
        for ((name, place), end) in fields.iter().zip(ends.chain([*size])) {
            assert_eq!(place.offset + place.size, end, "end of {name}");
        }
    }
}

#[test]
fn the_key_of_a_dialer_is_as_long_as_in_the_header() {
    let types = types();
    assert_eq!(
        number(&find(&types, "STRUCT", "dialer_key")["size"]),
        DIALER_KEY
    );
}

#[test]
fn the_key_of_a_listener_has_its_number_where_the_header_says() {
    let types = types();
    let key = find(&types, "STRUCT", "listener_key");
    assert_eq!(number(&key["size"]), LISTENER_KEY);
    let mut members = key["members"].as_array().unwrap().iter();
    let found = members.find(|member| member["name"] == "number").unwrap();
    assert_eq!(number(&found["bits_offset"]) / 8, LISTENER_KEY_NUMBER);
}

#[test]
fn enums_have_the_numbers_of_the_header() {
    let types = types();
    let values: Vec<(String, u64)> = types
        .iter()
        .filter(|found| found["kind"] == "ENUM")
        .flat_map(|found| found["values"].as_array().unwrap().clone())
        .map(|value| {
            let name = value["name"].as_str().unwrap().to_owned();
            (name, value["val"].as_u64().unwrap_or(u64::MAX))
        })
        .collect();
    let of = |name: &str| values.iter().find(|(known, _)| known == name);
    for (name, value) in ENUMS {
        // An enum that no program uses isn't in the object; the header says it then.
        let found = of(name).map_or_else(|| in_header(name), |(_, found)| *found);
        assert_eq!(found, u64::from(*value), "{name}");
    }
    for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
        let name = format!("REFUSED_{}", refusal.name().to_uppercase());
        let found = of(&name).map_or_else(|| in_header(&name), |(_, found)| *found);
        assert_eq!(usize::try_from(found).unwrap(), index, "{name}");
    }
}

/// The number of an enum's value, or of a constant, in the header's text.
fn in_header(name: &str) -> u64 {
    let text = include_str!("../../bpf/lib/abi.h");
    let line = text
        .lines()
        .find(|line| line.split_whitespace().any(|word| word == name))
        .unwrap_or_else(|| panic!("no {name} in the header"));
    let digits = line
        .rsplit([' ', '='])
        .next()
        .unwrap()
        .trim_end_matches(',');
    digits.parse().unwrap()
}

#[test]
fn constants_are_those_of_the_header() {
    for (name, value) in [
        ("RECORD_ADDRESSES_MAX", RECORD_ADDRESSES_MAX),
        ("RECORD_NAME_MAX", RECORD_NAME_MAX),
        ("RECORD_PATH_MAX", RECORD_PATH_MAX),
        ("REFUSALS_MAX", REFUSALS_MAX),
        ("RULES_MAX", RULES_MAX),
        ("SERVICES_MAX", SERVICES_MAX),
        ("TALKS_MAX", TALKS_MAX),
        ("TEXT_PART", TEXT_PART),
        ("LISTENERS_OF_ONE_MAX", LISTENERS_OF_ONE_MAX),
    ] {
        assert_eq!(usize::try_from(in_header(name)).unwrap(), value, "{name}");
    }
    let first = sandwire_kernel_net::nft::RELAY_MARK_FIRST >> 24;
    assert_eq!(in_header("RELAY_MARK_FIRST"), u64::from(first));
}

#[test]
fn addresses_are_sixteen_bytes_in_network_order() {
    for text in ["192.0.2.1", "2001:db8::1"] {
        let address: IpAddr = text.parse().unwrap();
        assert_eq!(address_of(address_bytes(address)), address);
    }
    let bytes = address_bytes("192.0.2.1".parse().unwrap());
    assert_eq!(bytes[10..], [0xff, 0xff, 192, 0, 2, 1]);
}
