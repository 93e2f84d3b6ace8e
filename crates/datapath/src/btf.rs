//! Reads BTF, the types that an object or a map was made with: layouts of structs by name.
//!
//! The format: <https://docs.kernel.org/bpf/btf.html>. Only the machine's own byte order is understood.

use std::{collections::BTreeMap, fs};

const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
/// Types inside types inside types end somewhere, if the data is sound.
const DEPTH_MAX: usize = 16;

const INT: u32 = 1;
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const RESTRICT: u32 = 11;
const FUNCTION: u32 = 12;
const FUNCTION_PROTOTYPE: u32 = 13;
const VARIABLE: u32 = 14;
const SECTION: u32 = 15;
const DECLARATION_TAG: u32 = 17;
const TYPE_TAG: u32 = 18;
const ENUM64: u32 = 19;

/// A range of bytes in a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// A range of bits in a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    pub(crate) position: u32,
    pub(crate) width: u32,
}

/// Types by number; 0 is `void`.
#[derive(Debug)]
pub(crate) struct Btf {
    types: Vec<Type>,
    /// Names, each ended by a zero. A kernel has a hundred thousand: they are not copied.
    strings: Vec<u8>,
}

#[derive(Debug)]
struct Type {
    /// Offset in the strings, as a member's.
    name: u32,
    kind: u32,
    /// Size in bytes, or the number of another type.
    size_or_type: u32,
    /// What follows the type, by its kind.
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: u32,
    /// Type of a member of a struct, value of an enum's, element type of an array.
    number: u32,
    /// Offset in bits, or the count of an array.
    position: u32,
    /// Width in bits of a bit field, else zero.
    width: u32,
}

impl Btf {
    /// The kernel's own types, where it tells them (`CONFIG_DEBUG_INFO_BTF`).
    pub(crate) fn of_kernel() -> Option<Self> {
        Self::parse(&fs::read(KERNEL_TYPES).ok()?)
    }

    /// Reads the content of a section `.BTF`. `None` if it is malformed.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let header = Reader(bytes);
        let magic = u16::from_ne_bytes(*bytes.first_chunk()?);
        if magic != MAGIC {
            return None;
        }
        let header_length = header.word(4)? as usize;
        let section = |offset: u32, length: u32| {
            let start = header_length.checked_add(offset as usize)?;
            bytes.get(start..start.checked_add(length as usize)?)
        };
        let types = section(header.word(8)?, header.word(12)?)?;
        let strings = section(header.word(16)?, header.word(20)?)?;
        let types = parse_types(types, strings)?;
        Some(Self {
            types,
            strings: strings.to_vec(),
        })
    }

    fn name_at(&self, offset: u32) -> &[u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        let end = rest.iter().position(|byte| *byte == 0);
        &rest[..end.unwrap_or(rest.len())]
    }

    fn text_at(&self, offset: u32) -> String {
        String::from_utf8_lossy(self.name_at(offset)).into_owned()
    }

    fn find(&self, name: &str, kinds: &[u32]) -> Option<&Type> {
        let is_it = |found: &&Type| {
            kinds.contains(&found.kind) && self.name_at(found.name) == name.as_bytes()
        };
        self.types.iter().find(is_it)
    }

    /// Size of a struct, and where each of its fields is.
    #[cfg(test)]
    pub(crate) fn fields(&self, name: &str) -> Option<(usize, Vec<(String, Place)>)> {
        let found = self.find(name, &[STRUCT])?;
        let fields = found.members.iter().map(|member| {
            let place = Place {
                offset: member.position as usize / 8,
                size: self.size_of(member.number, 0)?,
            };
            Some((self.text_at(member.name), place))
        });
        Some((found.size_or_type as usize, fields.collect::<Option<_>>()?))
    }

    /// Where each field of a struct is that isn't a struct itself, by its path: `egress.packets`.
    pub(crate) fn leaves(&self, name: &str) -> Option<BTreeMap<String, Place>> {
        let mut leaves = BTreeMap::new();
        self.add_leaves(self.find(name, &[STRUCT])?, "", 0, 0, &mut leaves)?;
        Some(leaves)
    }

    /// Number of the function of this name.
    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        let is_it =
            |found: &Type| found.kind == FUNCTION && self.name_at(found.name) == name.as_bytes();
        u32::try_from(self.types.iter().position(is_it)?).ok()
    }

    /// Where the field of this name is in a struct, or in one without a name inside it.
    pub(crate) fn bits(&self, struct_name: &str, field: &str) -> Option<Bits> {
        self.bits_in(self.find(struct_name, &[STRUCT])?, field, 0)
    }

    fn bits_in(&self, found: &Type, field: &str, depth: usize) -> Option<Bits> {
        let mut members = found.members.iter();
        members.find_map(|member| {
            let name = self.name_at(member.name);
            if name == field.as_bytes() {
                let width = match member.width {
                    0 => u32::try_from(self.size_of(member.number, 0)?.checked_mul(8)?).ok()?,
                    width => width,
                };
                let position = member.position;
                return Some(Bits { position, width });
            }
            if !name.is_empty() || depth > DEPTH_MAX {
                return None;
            }
            let inner = self.resolve(member.number, 0)?;
            let found = self.bits_in(inner, field, depth + 1)?;
            Some(Bits {
                position: found.position.checked_add(member.position)?,
                ..found
            })
        })
    }

    fn add_leaves(
        &self,
        found: &Type,
        path: &str,
        base: usize,
        depth: usize,
        leaves: &mut BTreeMap<String, Place>,
    ) -> Option<()> {
        for member in &found.members {
            let path = format!("{path}{}", self.text_at(member.name));
            let offset = base + member.position as usize / 8;
            let inner = self.resolve(member.number, depth)?;
            if inner.kind == STRUCT {
                if depth > DEPTH_MAX {
                    return None;
                }
                self.add_leaves(inner, &format!("{path}."), offset, depth + 1, leaves)?;
            } else {
                let size = self.size_of(member.number, depth)?;
                leaves.insert(path, Place { offset, size });
            }
        }
        Some(())
    }

    /// The type without names and qualifiers.
    fn resolve(&self, number: u32, depth: usize) -> Option<&Type> {
        let found = self.types.get(number as usize)?;
        match found.kind {
            TYPEDEF | VOLATILE | CONST | RESTRICT | TYPE_TAG if depth < DEPTH_MAX => {
                self.resolve(found.size_or_type, depth + 1)
            }
            _ => Some(found),
        }
    }

    fn size_of(&self, number: u32, depth: usize) -> Option<usize> {
        let found = self.resolve(number, depth)?;
        match found.kind {
            INT | STRUCT | UNION | ENUM | ENUM64 => Some(found.size_or_type as usize),
            POINTER => Some(8),
            ARRAY if depth < DEPTH_MAX => {
                let element = found.members.first()?;
                let size = self.size_of(element.number, depth + 1)?;
                size.checked_mul(element.position as usize)
            }
            _ => None,
        }
    }

    /// Names and numbers of an enum.
    #[cfg(test)]
    pub(crate) fn values(&self, name: &str) -> Option<Vec<(String, u32)>> {
        let found = self.find(name, &[ENUM])?;
        let values = found.members.iter();
        Some(
            values
                .map(|member| (self.text_at(member.name), member.number))
                .collect(),
        )
    }

    /// How many elements the array variable of this name has.
    #[cfg(test)]
    pub(crate) fn array_length(&self, variable: &str) -> Option<usize> {
        let found = self.find(variable, &[VARIABLE])?;
        let array = self.resolve(found.size_or_type, 0)?;
        Some(array.members.first()?.position as usize)
    }
}

fn parse_types(types: &[u8], strings: &[u8]) -> Option<Vec<Type>> {
    let mut found = vec![Type {
        name: 0,
        kind: 0,
        size_or_type: 0,
        members: Vec::new(),
    }];
    if strings.last() != Some(&0) {
        return None;
    }
    let name = |reader: &Reader<'_>| {
        let offset = reader.word(0)?;
        ((offset as usize) < strings.len()).then_some(offset)
    };
    let mut at = 0;
    while at < types.len() {
        let reader = Reader(types.get(at..)?);
        let information = reader.word(4)?;
        let (kind, count) = (information >> 24 & 0x1f, (information & 0xffff) as usize);
        // Of structs with bit fields, the upper byte of an offset is the width.
        let offset_mask = if information >> 31 == 0 {
            u32::MAX
        } else {
            0x00ff_ffff
        };
        let member = |position: usize| {
            let reader = Reader(types.get(at + 12 + position * 12..)?);
            Some(Member {
                name: name(&reader)?,
                number: reader.word(4)?,
                position: reader.word(8)? & offset_mask,
                width: (reader.word(8)? & !offset_mask) >> 24,
            })
        };
        let value = |position: usize| {
            let reader = Reader(types.get(at + 12 + position * 8..)?);
            Some(Member {
                name: name(&reader)?,
                number: reader.word(4)?,
                position: 0,
                width: 0,
            })
        };
        let (members, length) = match kind {
            STRUCT | UNION => ((0..count).map(member).collect::<Option<_>>()?, count * 12),
            ENUM => ((0..count).map(value).collect::<Option<_>>()?, count * 8),
            ARRAY => {
                let element = Member {
                    name: 0,
                    number: reader.word(12)?,
                    position: reader.word(20)?,
                    width: 0,
                };
                (vec![element], 12)
            }
            INT | VARIABLE | DECLARATION_TAG => (Vec::new(), 4),
            FUNCTION_PROTOTYPE => (Vec::new(), count * 8),
            SECTION | ENUM64 => (Vec::new(), count * 12),
            _ => (Vec::new(), 0),
        };
        found.push(Type {
            name: name(&reader)?,
            kind,
            size_or_type: reader.word(8)?,
            members,
        });
        at += 12 + length;
    }
    Some(found)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&self, offset: usize) -> Option<u32> {
        let bytes = self.0.get(offset..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, process::Command};

    use super::Btf;
    use crate::open::OBJECTS;

    impl Btf {
        /// What clang tells of the types in a source, which may include the programs' headers.
        pub(crate) fn compiled(source: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (input, output) = (folder.path().join("types.c"), folder.path().join("types.o"));
            fs::write(&input, source).unwrap();
            let package = Path::new(env!("CARGO_MANIFEST_DIR"));
            let result = Command::new(env!("SANDWIRE_CLANG"))
                .args(["-target", "bpf", "-O2", "-g", "-c", "-I"])
                .arg(package.join("bpf/lib"))
                .arg(format!(
                    "-I/usr/include/{}-linux-gnu",
                    std::env::consts::ARCH
                ))
                .arg(&input)
                .arg("-o")
                .arg(&output)
                .output()
                .unwrap();
            assert!(
                result.status.success(),
                "{}",
                String::from_utf8_lossy(&result.stderr)
            );
            let object = fs::read(&output).unwrap();
            let types = aya_obj::Object::parse(&object).unwrap().btf.unwrap();
            Self::parse(&types.to_bytes()).unwrap()
        }
    }

    fn section() -> Vec<u8> {
        let object = aya_obj::Object::parse(OBJECTS[0].bytes).unwrap();
        object.btf.unwrap().to_bytes()
    }

    #[test]
    fn leaves_are_named_by_their_path() {
        let leaves = Btf::parse(&section()).unwrap().leaves("counters").unwrap();
        let place = leaves["ingress.bytes"];
        assert_eq!((place.offset, place.size), (32, 8));
        assert_eq!(leaves["drops"].size, 48 * 8);
        assert!(!leaves.contains_key("ingress"));
    }

    #[test]
    fn fields_are_found_in_what_has_no_name() {
        let types = Btf::compiled(
            "struct outer { int first; union { long whole; struct { char low; char bits: 3, more: 2; }; }; } outer;",
        );
        let found = |field| {
            types
                .bits("outer", field)
                .map(|bits| (bits.position, bits.width))
        };
        assert_eq!(found("first"), Some((0, 32)));
        assert_eq!(found("whole"), Some((64, 64)));
        assert_eq!(found("more"), Some((64 + 8 + 3, 2)));
        assert_eq!(found("nothing"), None);
    }

    #[test]
    fn functions_are_found_by_their_names() {
        let types = Btf::compiled("int third(void) { return 3; } int fourth(void) { return 4; }");
        let (third, fourth) = (types.function("third"), types.function("fourth"));
        assert!(third.is_some() && fourth.is_some() && third != fourth);
        // A type of this name is no function.
        assert_eq!(types.function("int"), None);
    }

    #[test]
    fn truncated_types_are_refused() {
        let section = section();
        assert!(Btf::parse(&section).is_some());
        for length in (0..section.len()).step_by(7) {
            let read = Btf::parse(&section[..length]);
            assert!(read.is_none(), "{length} of {} bytes", section.len());
        }
    }

    #[test]
    fn changed_bytes_do_no_harm() {
        let mut section = section();
        for at in (24..section.len()).step_by(11) {
            let before = section[at];
            section[at] ^= 0x55;
            if let Some(types) = Btf::parse(&section) {
                // Whatever it says, asking for it ends.
                let _ = (types.leaves("nic"), types.fields("counters"));
                let _ = types.bits("skb_places", "nothing");
            }
            section[at] = before;
        }
    }
}
