//! The examples, run as their readers would.

mod built;

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Packets sent on each link, by the last report that the example printed.
fn links_of(example: &str) -> Result<BTreeMap<String, u64>> {
    let output = Command::new(built::example(example)?).output()?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "example {example}: {problem}");
    let text = String::from_utf8(output.stdout)?;
    ensure!(
        text.matches("load: time: ").count() == 3,
        "three reports: {text}"
    );
    let lines = text.lines().filter(|line| line.contains(" sent on "));
    lines
        .map(|line| {
            let (sent, link) = line.split_once(" sent on ").context("a line of links")?;
            let (link, loss) = link.split_once(" (").context("its loss")?;
            ensure!(loss == "loss rate: 0%)", "{line}");
            Ok((link.to_owned(), sent.trim().replace(',', "").parse()?))
        })
        .collect()
}

#[test]
fn odd_sizes_loses_half_of_its_packets() -> Result<()> {
    let links = links_of("odd_sizes")?;
    let [before, after] = [
        "source.output -> clumsy.input",
        "clumsy.output -> sink.input",
    ];
    let (before, after) = (links[before], links[after]);
    ensure!(after > 1000, "{links:?}");
    // Of each four frames two are odd.
    ensure!(before.abs_diff(2 * after) <= 2, "{links:?}");
    Ok(())
}

#[test]
fn basic1_gives_both_sinks_all_packets() -> Result<()> {
    let links = links_of("basic1")?;
    let sent = links["source.output -> tee.input"];
    ensure!(sent > 1000, "{links:?}");
    for sink in ["tee.output1 -> sink1.input", "tee.output2 -> sink2.input"] {
        ensure!(links[sink] == sent, "{links:?}");
    }
    Ok(())
}
