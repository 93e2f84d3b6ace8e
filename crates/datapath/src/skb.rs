//! Where this kernel's `struct sk_buff` says which checksum of a packet is to be finished, by the types that the kernel
//! tells of itself (`CONFIG_DEBUG_INFO_BTF`), and how programs get at it.

use std::borrow::Cow;

use sandwire_kernel_net::bpf::instruction;

use crate::{
    abi::{SKB_CAST, SKB_SPAN_MAX, SkbPlaces},
    btf::{Bits, Btf},
};

/// `CHECKSUM_PARTIAL` is all bits of the field `ip_summed`, which has two (`linux/skbuff.h`).
const STATE_BITS: u32 = 2;

/// Gives the programs the kernel's own struct of a packet, to be read without a copy (Linux 6.2).
const CAST: &str = "bpf_cast_to_kern_ctx";
const CALL: u8 = 0x85;
/// `BPF_PSEUDO_KFUNC_CALL`: the number is that of a function of the kernel.
const OF_KERNEL: u8 = 2;
const INSTRUCTION_LENGTH: usize = 8;

/// What the kernel says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub(crate) places: SkbPlaces,
    /// Number of [`CAST`].
    pub(crate) cast: Option<u32>,
}

/// `None` where the kernel's types say nothing that is understood.
pub(crate) fn told_by(types: &Btf) -> Option<Told> {
    Some(Told {
        places: places_by(types)?,
        cast: types.function(CAST),
    })
}

/// The call of a function of the kernel.
pub(crate) fn call_kernel(function: u32) -> [u8; INSTRUCTION_LENGTH] {
    instruction(CALL, 0, OF_KERNEL, 0, function.cast_signed())
}

/// An object whose calls of [`SKB_CAST`] are of this number of the kernel's. The loader's library knows no functions of
/// the kernel.
pub(crate) fn with_cast(object: &[u8], cast: Option<u32>) -> Cow<'_, [u8]> {
    let Some(number) = cast else {
        return Cow::Borrowed(object);
    };
    let placeholder = i32::try_from(SKB_CAST).expect("it is an immediate value");
    let stands_for_it = instruction(CALL, 0, 0, 0, placeholder);
    let mut object = object.to_vec();
    for found in object.chunks_exact_mut(INSTRUCTION_LENGTH) {
        if found == stands_for_it {
            found.copy_from_slice(&call_kernel(number));
        }
    }
    Cow::Owned(object)
}

fn places_by(types: &Btf) -> Option<SkbPlaces> {
    let bits = |field| types.bits("sk_buff", field);
    let state = bits("ip_summed").filter(|state| state.width == STATE_BITS)?;
    let shift = state.position % 8;
    let numbers = ["csum_start", "csum_offset", "mac_header"].map(|field| byte_of(bits(field)?));
    let [Some(start), Some(offset), Some(mac_header)] = numbers else {
        return None;
    };
    let state_byte = state.position / 8;
    let first = [state_byte, start, offset, mac_header].into_iter().min()?;
    let end = [state_byte + 1, start + 2, offset + 2, mac_header + 2];
    let length = end.into_iter().max()? - first;
    let fits = shift + STATE_BITS <= 8 && length as usize <= SKB_SPAN_MAX;
    let place = |byte: u32| u16::try_from(byte - first).ok();
    fits.then_some(SkbPlaces {
        first: u16::try_from(first).ok()?,
        length: u16::try_from(length).ok()?,
        state: place(state_byte)?,
        state_mask: 0b11 << shift,
        checksum_start: place(start)?,
        checksum_offset: place(offset)?,
        mac_header: place(mac_header)?,
    })
}

/// The byte that a number of 16 bits begins with.
fn byte_of(bits: Bits) -> Option<u32> {
    (bits.width == 16 && bits.position.is_multiple_of(8)).then_some(bits.position / 8)
}

#[cfg(test)]
mod tests {
    use super::{Btf, SkbPlaces, call_kernel, places_by, with_cast};
    use crate::open::OBJECTS;

    fn told(fields: &str) -> Option<SkbPlaces> {
        places_by(&Btf::compiled(&format!(
            "struct sk_buff {{ {fields} }} packet;"
        )))
    }

    #[test]
    fn fields_are_counted_from_the_first_of_them() {
        let places = told(
            "long others[5]; unsigned short mac_header; unsigned char kind: 3, ip_summed: 2; \
             union { unsigned csum; struct { unsigned short csum_start, csum_offset; }; };",
        );
        let expected = SkbPlaces {
            first: 40,
            length: 8,
            state: 2,
            state_mask: 0b11000,
            checksum_start: 4,
            checksum_offset: 6,
            mac_header: 0,
        };
        assert_eq!(places, Some(expected));
    }

    #[test]
    fn the_cast_is_called_where_programs_ask_for_it() {
        let cast = call_kernel(0x0102_0304);
        for object in &OBJECTS {
            let changed = with_cast(object.bytes, Some(0x0102_0304));
            let is_asked = ["from_guest", "to_guest", "child"].contains(&object.name);
            let calls = changed
                .chunks_exact(cast.len())
                .filter(|call| *call == cast);
            assert_eq!(calls.count() > 0, is_asked, "{}", object.name);
            assert_eq!(with_cast(object.bytes, None), object.bytes);
        }
    }

    #[test]
    fn what_is_not_as_expected_is_not_used() {
        let sound =
            "unsigned short csum_start, csum_offset, mac_header; unsigned char ip_summed: 2;";
        assert!(told(sound).is_some());
        for (part, other) in [
            ("mac_header", "mac"),
            ("ip_summed: 2", "ip_summed: 3"),
            ("ip_summed: 2", "ip_summed"),
            ("unsigned char ip_summed", "unsigned pad: 7, ip_summed"),
            ("unsigned short", "unsigned"),
            ("unsigned char ip", "char much[96]; unsigned char ip"),
        ] {
            let changed = sound.replace(part, other);
            assert_eq!(told(&changed), None, "{changed}");
        }
    }
}
