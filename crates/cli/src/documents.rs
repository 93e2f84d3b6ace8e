//! Keeps what documents and units tell people to run what this command line takes.
//!
//! Commands in blocks of code are parsed as a whole, those that prose mentions (`` `sandwire VERB …` ``) as far as they go:
//! their verbs and flags have to be there. Nothing is run.

use std::{
    fs,
    iter::Peekable,
    path::{Path, PathBuf},
    str::Chars,
};

use clap::{Command, CommandFactory, Parser, error::ErrorKind};

const PROGRAM: &str = "sandwire";
/// What may stand before a command in a line of a shell.
const BEFORE: [&str; 6] = ["do", "then", "else", "sudo", "exec", "time"];

/// The commands of a line of a shell, by their words; those within `$(…)` come first. What a shell would put in is a `1`, which
/// is a number and a name.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some('\''), '\'') | (Some('"'), '"') => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None | Some('"'), '$') => {
                let inner = substitution(&mut characters);
                if let Some(inner) = inner.strip_prefix('(') {
                    found.extend(commands(inner.strip_suffix(')').unwrap_or(inner)));
                }
                word.get_or_insert_default().push('1');
            }
            (None, '\\') => word.get_or_insert_default().extend(characters.next()),
            (None, '#') if word.is_none() => break,
            (None, ' ') => words.extend(word.take()),
            (None, '|' | ';' | '&' | '<' | '>' | '(' | ')') => {
                words.extend(word.take());
                found.push(std::mem::take(&mut words));
            }
            (_, other) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    found.push(words);
    found.retain(|words| !words.is_empty());
    found
}

/// What a shell puts in after a `$`, with its brackets.
fn substitution(characters: &mut Peekable<Chars<'_>>) -> String {
    let (open, close) = match characters.peek() {
        Some('(') => ('(', ')'),
        Some('{') => ('{', '}'),
        _ => {
            let is_name = |next: &char| next.is_alphanumeric() || *next == '_';
            return std::iter::from_fn(|| characters.next_if(is_name)).collect();
        }
    };
    let mut inner = String::new();
    let mut depth = 0;
    for next in characters.by_ref() {
        inner.push(next);
        depth += i32::from(next == open) - i32::from(next == close);
        if depth == 0 {
            break;
        }
    }
    inner
}

/// What follows our own name in a command, if it is one of ours.
fn of_ours(words: &[String]) -> Option<&[String]> {
    let start = words
        .iter()
        .position(|word| !BEFORE.contains(&word.as_str()) && !word.contains('='))?;
    let (program, rest) = words[start..].split_first()?;
    let is_ours = Path::new(program).file_name()?.to_str()? == PROGRAM;
    is_ours.then_some(rest)
}

/// A command with values for what it leaves open: `NAME`, `…`.
fn filled(words: &[String]) -> Vec<String> {
    let is_open = |word: &String| {
        word.chars()
            .all(|character| character.is_ascii_uppercase() || character == '-')
            && word.starts_with(|character: char| character.is_ascii_uppercase())
    };
    words
        .iter()
        .filter(|word| *word != "…")
        .map(|word| match is_open(word) {
            true => "x".to_owned(),
            false => word.replace('…', "x"),
        })
        .collect()
}

/// Why the command line refuses a command, if it does.
fn refusal(words: &[String]) -> Option<String> {
    let all = std::iter::once(PROGRAM.to_owned()).chain(filled(words));
    let error = crate::Arguments::try_parse_from(all).err()?;
    let is_help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    (!is_help).then(|| error.to_string())
}

/// Why a command that prose mentions in part can't be one, if it can't.
fn wrong_mention(words: &[String]) -> Option<String> {
    let mut tree = crate::Arguments::command();
    tree.build();
    let mut command: &Command = &tree;
    for word in words {
        let has = |long: &str| {
            let mut arguments = command.get_arguments();
            arguments.any(|argument| argument.get_long() == Some(long))
        };
        if word == "--" {
            return None;
        }
        if let Some(flag) = word.strip_prefix("--") {
            let long = flag.split('=').next().unwrap_or(flag);
            if !has(long) && !long.contains('…') {
                return Some(format!("`{}` has no --{long}", command.get_name()));
            }
        } else if let Some(next) = command.find_subcommand(word) {
            command = next;
        } else if std::ptr::eq(command, &tree) && word.starts_with(|c: char| c.is_ascii_lowercase())
        {
            return Some(format!("there is no verb {word}"));
        }
    }
    None
}

/// Commands in a document's blocks of code, by line.
fn in_blocks(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut fence: Option<String> = None;
    let mut goes_on = false;
    for (line, number) in text.lines().zip(1..) {
        let line = line.trim();
        if let Some(language) = line.strip_prefix("```") {
            fence = fence.is_none().then(|| language.trim().to_owned());
            goes_on = false;
            continue;
        }
        let prompted = line.strip_prefix("# ").or(line.strip_prefix("$ "));
        let command = match fence.as_deref() {
            Some(_) if goes_on => Some(line),
            Some("console") => prompted,
            Some("sh" | "bash" | "shell") => Some(line),
            // A unit's line, say.
            Some(_) => line.find("/usr/bin/sandwire ").map(|start| &line[start..]),
            None => None,
        };
        let Some(command) = command else { continue };
        let (part, more) = match command.strip_suffix('\\') {
            Some(part) => (part, true),
            None => (command, false),
        };
        match found.last_mut().filter(|_| goes_on) {
            Some((_, whole)) => whole.push_str(part),
            None => found.push((number, part.to_owned())),
        }
        goes_on = more;
    }
    found
}

/// What stands between backticks outside of blocks and begins with our name, by line.
fn mentions(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_block = false;
    for (line, number) in text.lines().zip(1..) {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if !is_block {
            let spans = line.split('`').skip(1).step_by(2);
            let ours = spans.filter(|span| span.starts_with("sandwire "));
            found.extend(ours.map(|span| (number, span.to_owned())));
        }
    }
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Files of a folder with this ending.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(root().join(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == ending)
        })
        .collect();
    found.sort();
    assert!(!found.is_empty(), "{folder} has no .{ending}");
    found
}

#[test]
fn every_command_of_the_documents_is_one() {
    let mut documents = vec![root().join("README.md"), root().join("ARCHITECTURE.md")];
    documents.extend(files("docs", "md"));
    documents.extend(files("docs/recipes", "md"));
    let (mut wrong, mut parsed, mut mentioned) = (Vec::new(), 0, 0);
    for path in documents {
        let text = fs::read_to_string(&path).unwrap();
        for (line, command) in in_blocks(&text) {
            for words in commands(&command) {
                let Some(rest) = of_ours(&words) else {
                    continue;
                };
                parsed += 1;
                if let Some(reason) = refusal(rest) {
                    wrong.push(format!("{}:{line}: {command}\n{reason}", path.display()));
                }
            }
        }
        for (line, span) in mentions(&text) {
            for words in commands(&span) {
                let Some(rest) = of_ours(&words) else {
                    continue;
                };
                mentioned += 1;
                if let Some(reason) = wrong_mention(rest) {
                    wrong.push(format!("{}:{line}: `{span}`: {reason}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    // Else nothing was found where there is much.
    assert!(parsed > 80 && mentioned > 80, "{parsed}, {mentioned}");
}

#[test]
fn every_command_of_the_units_is_one() {
    for path in files("packaging/systemd", "service") {
        let text = fs::read_to_string(&path).unwrap();
        let starts = text
            .lines()
            .filter_map(|line| line.strip_prefix("ExecStart="));
        let mut count = 0;
        for words in starts.flat_map(commands) {
            let rest = of_ours(&words).unwrap();
            assert_eq!(refusal(rest), None, "{}", path.display());
            count += 1;
        }
        assert_eq!(count, 1, "{}", path.display());
    }
}

#[test]
fn lines_of_a_shell_are_read() {
    let words = |line: &str| -> Vec<String> {
        let all = commands(line);
        all.iter().map(|words| words.join("_")).collect()
    };
    for (line, expected) in [
        ("sandwire list # of all", vec!["sandwire_list"]),
        ("a 'b  c' \"d $e\"\\ f", vec!["a_b  c_d 1 f"]),
        (
            "x=$(sandwire show \"$y\" | jq -r .z)",
            vec!["sandwire_show_1", "jq_-r_.z", "x=1"],
        ),
        ("a && b; c > d &", vec!["a", "b", "c", "d"]),
        ("ping ${HOST}", vec!["ping_1"]),
        ("# nothing", vec![]),
    ] {
        assert_eq!(words(line), expected, "{line}");
    }
    let ours = |line: &str| of_ours(&commands(line)[0]).map(<[String]>::to_vec);
    assert_eq!(
        ours("do A=b /usr/bin/sandwire list"),
        Some(vec!["list".to_owned()])
    );
    assert_eq!(ours("echo sandwire list"), None);
}

#[test]
fn commands_that_do_not_exist_are_told_of() {
    let words = |line: &str| commands(line).remove(0);
    for line in ["list --nonsense", "pool make web", "acquire"] {
        assert!(refusal(&words(line)).is_some(), "{line}");
    }
    for line in ["show NAME", "policy show cni-5d…-9b", "list --help"] {
        assert_eq!(refusal(&words(line)), None, "{line}");
    }
    for line in ["lists", "pool create --nonsense", "--nonsense list"] {
        assert!(wrong_mention(&words(line)).is_some(), "{line}");
    }
    for line in [
        "… --json",
        "run --pool web -- ls --all",
        "pool create --size",
    ] {
        assert_eq!(wrong_mention(&words(line)), None, "{line}");
    }
    let text = "```console\n# a \\\n   b\nc\n$ d\n```\n`sandwire list`\n```ini\nExecStart=+/usr/bin/sandwire e\nf\n```\n";
    let expected = [(2, "a b"), (5, "d"), (9, "/usr/bin/sandwire e")];
    let found = in_blocks(text);
    let found: Vec<(usize, &str)> = found.iter().map(|(line, text)| (*line, &**text)).collect();
    assert_eq!(found, expected);
    assert_eq!(mentions(text), [(7, "sandwire list".to_owned())]);
}
