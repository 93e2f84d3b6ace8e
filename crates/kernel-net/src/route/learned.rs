//! Default routes that the kernel has learned by itself, which netlink tells of like those that programs make.

use std::{collections::BTreeSet, fs};

use crate::Error;

/// Interfaces whose IPv6 default routes are all ones that the kernel itself has learned from router advertisements, in
/// the calling thread's namespace. Of programs' routes, which netlink says the same of, it knows only that they are there.
///
/// # Errors
/// The kernel's list can't be read.
pub fn interfaces_of_learned_defaults() -> Result<BTreeSet<String>, Error> {
    const LIST: &str = "/proc/thread-self/net/ipv6_route";
    let text = fs::read_to_string(LIST).map_err(|source| Error::system("read", LIST, source))?;
    Ok(with_learned_defaults_alone(&text))
}

/// The same from the text of `/proc/net/ipv6_route`.
fn with_learned_defaults_alone(text: &str) -> BTreeSet<String> {
    /// `RTF_DEFAULT | RTF_ADDRCONF`.
    const LEARNED: u32 = 0x0001_0000 | 0x0004_0000;
    let (mut learned, mut others) = (BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[_, "00", .., flags, interface] = fields.as_slice() else {
            continue;
        };
        let is_learned =
            u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & LEARNED == LEARNED);
        let into = if is_learned {
            &mut learned
        } else {
            &mut others
        };
        into.insert(interface.to_owned());
    }
    &learned - &others
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a kernel lists them that has heard a router on `e7`, with a program's route and its own on `e8`, and a program's
    /// alone on `e9`.
    const ROUTES: &str = "\
fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000004007adfffe2e0f51 00000400 00000001 00000000 00450003       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000004007adfffe2e0f51 00000400 00000001 00000000 00450003       e8
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000099 00000005 00000001 00000000 00000003       e8
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000099 00000005 00000001 00000000 00000003       e9
00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000002 00000000 80200001       lo
ff000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000004 00000000 00000001       e7
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
";

    #[test]
    fn what_the_kernel_learned_itself_is_told_from_what_a_program_made() {
        let found = with_learned_defaults_alone(ROUTES);
        assert_eq!(found, BTreeSet::from(["e7".to_owned()]));
        assert!(interfaces_of_learned_defaults().is_ok() || !crate::ipv6::is_known());
    }
}
