//! Rules about the eBPF programs in C: first comment, licence, tabs, sizes.
//!
//! Shape only, read off the text: clang judges the language, the kernel the program. Functions are
//! found by the kernel's own style: the brace that opens one stands alone at the line's start.

use std::path::Path;

use super::{
    Finding, finding,
    source::{FILE_LINES_MAX, FUNCTION_LINES_MAX, check_marks, check_name},
};

/// What the kernel demands of who uses its helpers, and we of everybody alike.
const LICENCE: &str = "\"Dual MIT/GPL\"";

/// Checks one file in C.
pub(super) fn check(path: &Path, text: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = check_name(path).into_iter().collect();
    findings.extend(check_marks(path, text));
    findings.extend(check_first_comment(path, text));
    findings.extend(check_licence(path, text));
    findings.extend(check_indentation(path, text));
    findings.extend(check_sizes(path, text));
    findings
}

fn check_first_comment(path: &Path, text: &str) -> Option<Finding> {
    // A licence's identifier may stand first; it is a comment that says nothing of the file.
    let mut lines = text
        .lines()
        .zip(1..)
        .filter(|(line, _)| !line.trim().is_empty() && !line.contains("SPDX-License-Identifier"));
    let (first, number) = lines.next().unwrap_or(("", 1));
    let words = first.trim_start_matches(['/', '*', ' ']);
    let is_comment = first.starts_with("/*") || first.starts_with("//");
    (!is_comment || words.is_empty() && text.lines().nth(number).is_none_or(|line| line.len() <= 3))
        .then(|| {
            finding(
                path,
                number,
                "the file does not open with a comment about it",
            )
        })
}

fn check_licence(path: &Path, text: &str) -> Option<Finding> {
    let is_object = path.to_string_lossy().ends_with(".bpf.c");
    let says_so = text
        .lines()
        .any(|line| line.contains("SEC(\"license\")") && line.contains(LICENCE));
    (is_object && !says_so).then(|| {
        let message = format!("no licence: char LICENSE[] SEC(\"license\") = {LICENCE};");
        finding(path, 1, message)
    })
}

fn check_indentation(path: &Path, text: &str) -> Vec<Finding> {
    text.lines()
        .zip(1..)
        .filter(|(line, _)| line.starts_with("  "))
        .map(|(_, number)| finding(path, number, "indented by spaces; use tabs"))
        .collect()
}

fn check_sizes(path: &Path, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let length = text.lines().count();
    if length > FILE_LINES_MAX {
        let message = format!("{length} lines; at most {FILE_LINES_MAX}: split it");
        findings.push(finding(path, 1, message));
    }
    let mut opened = None;
    for (line, number) in text.lines().zip(1..) {
        match (line.trim_end(), opened) {
            ("{", _) => opened = Some(number),
            ("}", Some(first)) => {
                opened = None;
                let lines = number + 1 - first;
                if lines > FUNCTION_LINES_MAX {
                    let message =
                        format!("{lines} lines in one function; at most {FUNCTION_LINES_MAX}");
                    findings.push(finding(path, first, message));
                }
            }
            _ => {}
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "\
// SPDX-License-Identifier: MIT OR GPL-2.0
/* Drops everything. */
#include \"lib/abi.h\"

SEC(\"classifier\")
int drop(struct __sk_buff *skb)
{
\treturn 2;
}

char LICENSE[] SEC(\"license\") = \"Dual MIT/GPL\";
";

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    fn assert_one(text: &str, part: &str) {
        let messages = messages("crates/datapath/bpf/drop.bpf.c", text);
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(messages[0].contains(part), "{messages:?}");
    }

    #[test]
    fn a_plain_program_is_clean() {
        assert_eq!(
            messages("crates/datapath/bpf/drop.bpf.c", CLEAN),
            Vec::<String>::new()
        );
        let header = "/* What it is about.\n *\n * More of it.\n */\n#define A 1\n";
        assert_eq!(
            messages("crates/datapath/bpf/lib/abi.h", header),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_file_without_a_first_comment_is_found() {
        assert_one(&CLEAN.replace("/* Drops everything. */\n", ""), "open with");
        assert_one(
            &CLEAN.replace("/* Drops everything. */", "/*\n */"),
            "open with",
        );
    }

    #[test]
    fn another_licence_is_found_in_objects_only() {
        let text = CLEAN.replace("Dual MIT/GPL", "Proprietary");
        assert_one(&text, "no licence");
        assert!(messages("crates/datapath/bpf/lib/drop.h", &text).is_empty());
    }

    #[test]
    fn spaces_in_front_are_found() {
        assert_one(&CLEAN.replace('\t', "    "), "use tabs");
    }

    #[test]
    fn a_long_function_and_a_long_file_are_found() {
        let body = "\ttouch();\n".repeat(FUNCTION_LINES_MAX);
        assert_one(&CLEAN.replace("\treturn 2;\n", &body), "72 lines in one");
        let long = format!("{CLEAN}{}", "#define A 1\n".repeat(FILE_LINES_MAX));
        assert_one(&long, "611 lines");
    }

    #[test]
    fn an_unfinished_mark_is_found() {
        let text = format!("{CLEAN}/* {}: rest */\n", concat!("TO", "DO"));
        assert_one(&text, "unfinished");
    }
}
