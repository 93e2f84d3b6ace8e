//! The mirror against the header as clang compiles it, and against the programs that are embedded.

use std::{fmt::Write as _, fs};

use sandwire_api::drop_reason::DropReason;

use super::*;
use crate::{btf::Btf, open::OBJECTS};

/// The header's types, each used by a variable so that the compiler describes it.
fn header() -> Btf {
    let mut source = String::from("#include \"abi.h\"\n");
    for layout in STRUCTS {
        writeln!(source, "struct {0} struct_{0};", layout.name).unwrap();
    }
    for (name, _) in ENUMS {
        writeln!(source, "enum {name} enum_{name};").unwrap();
    }
    writeln!(source, "enum drop_reason enum_drop_reason;").unwrap();
    for (name, _) in CONSTANTS {
        writeln!(source, "char constant_{name}[{name}];").unwrap();
    }
    Btf::compiled(&source)
}

fn types_of(object: &[u8]) -> Btf {
    let object = aya_obj::Object::parse(object).unwrap();
    Btf::parse(&object.btf.unwrap().to_bytes()).unwrap()
}

fn compare(types: &Btf, layout: &Layout) {
    let (size, fields) = types.fields(layout.name).unwrap();
    assert_eq!(size, layout.size, "size of {}", layout.name);
    let mirrored: Vec<&Field> = layout
        .fields
        .iter()
        .filter(|field| field.name != "padding")
        .collect();
    assert_eq!(fields.len(), mirrored.len(), "fields of {}", layout.name);
    for ((name, place), field) in fields.iter().zip(mirrored) {
        let declared = (name.as_str(), place.offset, place.size);
        assert_eq!(
            declared,
            (field.name, field.offset, field.size),
            "in {}",
            layout.name
        );
    }
}

#[test]
fn structs_are_laid_out_as_in_the_header() {
    let types = header();
    for layout in STRUCTS {
        compare(&types, layout);
    }
}

#[test]
fn programs_were_compiled_from_that_header() {
    let mut seen = 0;
    for object in &OBJECTS {
        let types = types_of(object.bytes);
        for layout in STRUCTS {
            if types.fields(layout.name).is_some() {
                compare(&types, layout);
                seen += 1;
            }
        }
    }
    assert!(seen > STRUCTS.len(), "only {seen} structs in all objects");
}

#[test]
fn the_header_has_no_struct_or_enum_that_is_not_mirrored() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/bpf/lib/abi.h")).unwrap();
    let declared = |keyword: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(keyword));
        lines
            .filter_map(|rest| rest.strip_suffix(" {"))
            .map(str::to_owned)
            .collect()
    };
    let structs: Vec<&str> = STRUCTS.iter().map(|layout| layout.name).collect();
    let enums: Vec<&str> = ENUMS.iter().map(|(name, _)| *name).collect();
    for name in declared("struct ") {
        assert!(structs.contains(&name.as_str()), "struct {name}");
    }
    for name in declared("enum ") {
        assert!(
            name == "drop_reason" || enums.contains(&name.as_str()),
            "enum {name}"
        );
    }
    let defined = text
        .lines()
        .filter_map(|line| line.strip_prefix("#define "));
    for line in defined.filter(|line| line.contains(' ')) {
        let name = line.split(' ').next().unwrap();
        assert!(
            CONSTANTS.iter().any(|(known, _)| *known == name),
            "constant {name}"
        );
    }
}

#[test]
fn enums_have_the_numbers_of_the_header() {
    let types = header();
    for (name, mirrored) in ENUMS {
        let values = types.values(name).unwrap();
        let values: Vec<(&str, u32)> = values
            .iter()
            .map(|(name, number)| (name.as_str(), *number))
            .collect();
        assert_eq!(&values, mirrored, "enum {name}");
    }
}

#[test]
fn drop_reasons_are_those_of_the_interface() {
    let values = header().values("drop_reason").unwrap();
    let mut expected = vec![("DROP_NONE".to_owned(), 0)];
    expected.extend(DropReason::ALL.iter().map(|reason| {
        let name = format!("DROP_{}", reason.name().to_uppercase());
        (name, u32::from(*reason as u8))
    }));
    assert_eq!(values, expected);
    assert!(values.len() <= DROP_REASONS_MAX);
}

#[test]
fn constants_are_those_of_the_header() {
    let types = header();
    for (name, value) in CONSTANTS {
        let length = types.array_length(&format!("constant_{name}"));
        assert_eq!(length, Some(*value), "{name}");
    }
}

#[test]
fn addresses_are_sixteen_bytes_in_network_order() {
    let ipv4: IpAddr = "192.0.2.1".parse().unwrap();
    let bytes = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
    assert_eq!(Address::from(ipv4).bytes(), bytes);
    assert_eq!(IpAddr::from(Address::from(ipv4)), ipv4);
    let ipv6: IpAddr = "2001:db8::1".parse().unwrap();
    assert_eq!(IpAddr::from(Address::from(ipv6)), ipv6);
    assert_eq!(
        ipv4_of(network_order(Ipv4Addr::new(192, 0, 2, 1))),
        Some(Ipv4Addr::new(192, 0, 2, 1))
    );
    assert_eq!(ipv4_of(0), None);
}
