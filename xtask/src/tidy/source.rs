//! Rules about Rust source: module headers, sizes, names, `unsafe`, ignored tests.

use std::path::Path;

use syn::{
    Attribute, Expr, ExprUnsafe, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, Lit, Meta, Safety,
    spanned::Spanned,
    visit::{self, Visit},
};

use super::{Finding, finding};
use crate::test::{REASON_ENDING, tier_of_reason};

pub(super) const FUNCTION_LINES_MAX: usize = 70;
pub(super) const FILE_LINES_MAX: usize = 600;
/// Names that say nothing of what is inside.
const EMPTY_NAMES: [&str; 6] = ["utils", "util", "common", "helpers", "manager", "misc"];
/// The only crates that may talk to the kernel past the borrow checker.
const UNSAFE_FOLDERS: [&str; 5] = [
    "crates/kernel-net",
    "crates/datapath",
    "crates/vsock-host",
    "crates/engine/src/io",
    "crates/engine/tests/edges",
];

/// Checks one source file.
pub(super) fn check(path: &Path, text: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = check_name(path).into_iter().collect();
    findings.extend(check_marks(path, text));
    match syn::parse_file(text) {
        Ok(file) => findings.extend(check_syntax(path, text, &file)),
        Err(error) => {
            let line = error.span().start().line;
            findings.push(finding(path, line, format!("does not parse: {error}")));
        }
    }
    findings
}

pub(super) fn check_name(path: &Path) -> Option<Finding> {
    let name = path
        .components()
        .map(|part| part.as_os_str().to_string_lossy())
        .map(|part| part.split('.').next().unwrap_or_default().to_owned())
        .find(|part| EMPTY_NAMES.contains(&part.as_str()))?;
    let message = format!("'{name}' does not say what is inside; name its subject");
    Some(finding(path, 1, message))
}

pub(super) fn check_marks(path: &Path, text: &str) -> Vec<Finding> {
    // Written in two parts, so that this file passes its own rule.
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X:"),
    ];
    text.lines()
        .zip(1..)
        .filter(|(line, _)| marks.iter().any(|mark| line.contains(mark)))
        .map(|(_, number)| finding(path, number, "unfinished: finish it, or say why it is so"))
        .collect()
}

fn check_syntax(path: &Path, text: &str, file: &syn::File) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_test = is_for_tests_alone(path);
    let is_test_module = is_test && path.components().any(|part| part.as_os_str() == "src");
    if !is_test_module && !file.attrs.iter().any(is_inner_documentation) {
        findings.push(finding(path, 1, "the module does not open with `//!`"));
    }
    let lines = lines_before_tests(file).unwrap_or_else(|| text.lines().count());
    if lines > FILE_LINES_MAX && !is_test {
        let message = format!("{lines} lines before tests; at most {FILE_LINES_MAX}: split it");
        findings.push(finding(path, 1, message));
    }
    let mut visitor = Visitor {
        path,
        may_be_unsafe: UNSAFE_FOLDERS.iter().any(|folder| path.starts_with(folder)),
        in_tests: is_test,
        findings: Vec::new(),
    };
    visitor.visit_file(file);
    findings.extend(visitor.findings);
    findings
}

/// Whether a file holds nothing but tests: one of `tests/`, or a module `tests` in a file of its own.
fn is_for_tests_alone(path: &Path) -> bool {
    path.with_extension("")
        .components()
        .any(|part| part.as_os_str() == "tests")
}

fn is_inner_documentation(attribute: &Attribute) -> bool {
    matches!(attribute.style, syn::AttrStyle::Inner(_)) && attribute.path().is_ident("doc")
}

fn lines_before_tests(file: &syn::File) -> Option<usize> {
    file.items.iter().find_map(|item| match item {
        Item::Mod(module) if is_for_tests(&module.attrs) => {
            Some(module.attrs[0].span().start().line - 1)
        }
        _ => None,
    })
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|condition| condition.is_ident("test"))
    })
}

/// Walks a file's syntax and collects what is wrong inside it.
struct Visitor<'a> {
    path: &'a Path,
    may_be_unsafe: bool,
    in_tests: bool,
    findings: Vec<Finding>,
}

impl Visitor<'_> {
    fn report(&mut self, at: &impl Spanned, message: impl Into<String>) {
        let line = at.span().start().line;
        self.findings.push(finding(self.path, line, message));
    }

    fn check_function(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let first = signature.span().start().line;
        let lines = body.span().end().line + 1 - first;
        if lines > FUNCTION_LINES_MAX && !self.in_tests {
            let name = &signature.ident;
            let message = format!("{name} has {lines} lines; at most {FUNCTION_LINES_MAX}");
            self.report(signature, message);
        }
        if let Safety::Unsafe(keyword) = &signature.safety {
            self.check_unsafe(keyword);
        }
    }

    fn check_unsafe(&mut self, at: &impl Spanned) {
        if !self.may_be_unsafe {
            let folders = UNSAFE_FOLDERS.join(" and ");
            self.report(at, format!("`unsafe` is for {folders} alone"));
        }
    }

    fn check_ignored(&mut self, attributes: &[Attribute]) {
        let ignored = attributes
            .iter()
            .filter(|attribute| attribute.path().is_ident("ignore"));
        for attribute in ignored {
            if ignore_reason(attribute)
                .and_then(|reason| tier_of_reason(&reason))
                .is_none()
            {
                let message = format!(
                    "say what the test needs and which tier runs it: \
                     #[ignore = \"needs …: {REASON_ENDING}TIER\"]"
                );
                self.report(attribute, message);
            }
        }
    }
}

fn ignore_reason(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    let Expr::Lit(literal) = &pair.value else {
        return None;
    };
    match &literal.lit {
        Lit::Str(text) => Some(text.value()),
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.check_function(&function.sig, &function.block);
        self.check_ignored(&function.attrs);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.check_function(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if let Some(unsafety) = &item.unsafety {
            self.check_unsafe(unsafety);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast ExprUnsafe) {
        self.check_unsafe(&block.unsafe_token);
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        let outside = self.in_tests;
        self.in_tests |= is_for_tests(&module.attrs);
        visit::visit_item_mod(self, module);
        self.in_tests = outside;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    fn assert_one(path: &str, text: &str, part: &str) {
        let messages = messages(path, text);
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(messages[0].contains(part), "{messages:?}");
    }

    #[test]
    fn a_plain_module_is_clean() {
        let text = "//! Header.\nfn f() {}\n#[cfg(test)]\nmod tests {}\n";
        assert_eq!(
            messages("crates/slot/src/plan.rs", text),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_module_without_a_header_is_found() {
        assert_one("crates/slot/src/plan.rs", "fn f() {}\n", "open with `//!`");
        assert_one(
            "crates/slot/tests/netns.rs",
            "fn f() {}\n",
            "open with `//!`",
        );
        for path in [
            "crates/slot/src/plan/tests.rs",
            "crates/slot/src/pool/tests/fill.rs",
        ] {
            assert!(messages(path, "fn f() {}\n").is_empty(), "{path}");
        }
    }

    #[test]
    fn a_name_that_says_nothing_is_found() {
        for path in ["crates/slot/src/utils.rs", "crates/slot/src/common/plan.rs"] {
            assert_one(path, "//! Header.\n", "does not say");
        }
    }

    #[test]
    fn a_long_function_is_found_outside_tests_only() {
        let body = "    g();\n".repeat(FUNCTION_LINES_MAX);
        let text = format!("//! Header.\nfn f() {{\n{body}}}\n");
        assert_one("crates/slot/src/plan.rs", &text, "f has 72 lines");
        for path in [
            "crates/slot/tests/netns.rs",
            "crates/slot/src/plan/tests.rs",
        ] {
            assert!(messages(path, &text).is_empty(), "{path}");
        }
    }

    #[test]
    fn a_long_file_is_found_and_its_tests_do_not_count() {
        let items = "const A: () = ();\n".repeat(FILE_LINES_MAX - 1);
        let fits = format!("//! Header.\n{items}#[cfg(test)]\nmod tests {{}}\n");
        assert!(messages("crates/slot/src/plan.rs", &fits).is_empty());
        let long = format!("//! Header.\n\n{items}#[cfg(test)]\nmod tests {{}}\n");
        assert_one("crates/slot/src/plan.rs", &long, "601 lines");
    }

    #[test]
    fn unsafe_code_is_found_outside_its_crate() {
        for text in [
            "//! Header.\nfn f() { unsafe { g() } }\n",
            "//! Header.\nunsafe fn f() {}\n",
            "//! Header.\nunsafe impl Send for A {}\n",
        ] {
            assert_one("crates/slot/src/plan.rs", text, "`unsafe`");
            for path in [
                "crates/kernel-net/src/sys.rs",
                "crates/datapath/src/map.rs",
                "crates/vsock-host/src/memory.rs",
            ] {
                assert!(messages(path, text).is_empty(), "{path}");
            }
        }
    }

    #[test]
    fn an_ignored_test_names_its_tier() {
        let test = |ignore: &str| format!("//! Header.\n#[test]\n{ignore}\nfn f() {{}}\n");
        let good = test("#[ignore = \"needs root: cargo xtask test netns\"]");
        assert!(messages("crates/slot/tests/netns.rs", &good).is_empty());
        for ignore in ["#[ignore]", "#[ignore = \"slow\"]"] {
            assert_one("crates/slot/tests/netns.rs", &test(ignore), "which tier");
        }
    }

    #[test]
    fn an_unfinished_mark_is_found() {
        let text = format!("//! Header.\n// {}: rest\n", concat!("TO", "DO"));
        assert_one("crates/slot/src/plan.rs", &text, "unfinished");
    }
}
