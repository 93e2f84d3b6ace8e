//! Runs the tests of the engine's core under Miri, where it is installed.
//!
//! Miri comes with nightly compilers only, so no tier of `cargo xtask test` needs it: without it nothing fails, and
//! what was not run is said. It interprets every step and can't make most system calls, so what runs is what moves
//! packets in memory: pool, links, graph, the ring between threads, and the rings of AF_XDP on memory of a test.

use std::process::ExitCode;

use anyhow::Result;

use crate::command;

/// Runs tests under Miri.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Fail if Miri is not installed.
    #[arg(long)]
    require: bool,
    /// The toolchain whose Miri is used.
    #[arg(long, default_value = "nightly")]
    toolchain: String,
}

/// What runs: arguments for `cargo test`, and parts of the names of tests.
const RUNS: [(&[&str], &[&str]); 2] = [
    (
        &["--lib"],
        &[
            "pool::",
            "packet::",
            "order::",
            "graph::",
            "interlink::",
            "xdp::ring::",
        ],
    ),
    (&["--test", "graphs"], &[]),
];

/// Cases of each property: every one is a thousand times slower than without Miri.
const CASES: &str = "4";

/// Runs `cargo xtask miri`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(obstacle) = obstacle(&arguments.toolchain) {
        println!("not run: miri ({obstacle})");
        return Ok(if arguments.require {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        });
    }
    for (what, filters) in RUNS {
        let start = ["miri", "test", "--locked", "--package", "sandwire-engine"];
        let words = (start.iter().chain(what).chain(&["--"]).chain(filters)).copied();
        with_toolchain(&arguments.toolchain, words)
            // Properties look for a file of earlier failures, and read how many cases they have.
            .env("MIRIFLAGS", "-Zmiri-disable-isolation")
            .env("PROPTEST_CASES", CASES)
            .run()?;
    }
    println!("miri: the engine's core is clean");
    Ok(ExitCode::SUCCESS)
}

/// Why Miri can't run here, if it can't.
fn obstacle(toolchain: &str) -> Option<String> {
    if command::find("rustup").is_none() {
        return Some("no rustup, which finds other toolchains".to_owned());
    }
    let answers = with_toolchain(toolchain, ["miri", "--version"]).output();
    answers.err().map(|_| {
        format!(
            "toolchain {toolchain} has no Miri; `rustup toolchain install {toolchain} --component miri,rust-src` \
             installs it"
        )
    })
}

fn with_toolchain<'a>(
    toolchain: &'a str,
    words: impl IntoIterator<Item = &'a str>,
) -> command::Invocation {
    let start = ["run", toolchain, "cargo"];
    command::program("rustup", start.into_iter().chain(words))
}
