//! Text for people: tables that fit the terminal, times, sizes, pairs of key and value.

use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::{ContentArrangement, Table, presets};
use sandwire_api::slot::{DataPath, SlotKind};

/// A table without lines whose columns wrap so that it fits the terminal. Away from a terminal
/// every row is one line.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(headings.iter().copied());
    // A terminal that doesn't know how wide it is.
    if table.width() == Some(0) {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// A table as text, without blanks at the ends of lines.
pub(crate) fn table_text(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Lines of `key: value` with the values in one column.
pub(crate) fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(key, _)| key.len()).max().unwrap_or(0) + 1;
    let line = |(key, value): &(&str, String)| {
        let key = format!("{key}:");
        format!("{key:<width$} {value}\n")
    };
    pairs.iter().map(line).collect()
}

/// The time now in seconds since 1970-01-01 UTC.
pub(crate) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// A span of time by its two largest units, as `3h 5m`.
pub(crate) fn span(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// A number of bytes by a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    // Tenths in integers: a counter may exceed what a float holds exactly.
    let mut tenths = u128::from(count) * 10 / 1024;
    let mut unit = 0;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// A number with its noun, as `1 slot` or `3 slots`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// A kind of slot, as the API writes it.
pub(crate) fn kind(kind: SlotKind) -> &'static str {
    match kind {
        SlotKind::Netns => "netns",
        SlotKind::Host => "host",
        SlotKind::Container => "container",
    }
}

/// A data path, as the API writes it.
pub(crate) fn data_path(path: DataPath) -> &'static str {
    match path {
        DataPath::Nft => "nft",
        DataPath::Ebpf => "ebpf",
        DataPath::Xdp => "xdp",
        DataPath::Auto => "auto",
    }
}

/// A number by a decimal unit, with three digits at most, as `1.25 G`.
pub(crate) fn decimal(value: u64) -> String {
    const UNITS: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    if value < 1000 {
        return value.to_string();
    }
    let (mut scale, mut unit) = (1000, 0);
    while value / scale >= 1000 {
        scale *= 1000;
        unit += 1;
    }
    let whole = value / scale;
    let part = value % scale;
    let unit = UNITS[unit];
    match whole {
        0..10 => format!("{whole}.{:02} {unit}", part / (scale / 100)),
        10..100 => format!("{whole}.{} {unit}", part / (scale / 10)),
        _ => format!("{whole} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_show_their_two_largest_units() {
        let shown = [0, 59, 61, 3600, 90_061].map(span);
        assert_eq!(shown, ["0s", "59s", "1m 1s", "1h 0m", "1d 1h"]);
    }

    #[test]
    fn bytes_show_one_decimal_of_a_binary_unit() {
        let shown = [0, 1023, 1024, 1536, 10_485_760, u64::MAX].map(bytes);
        assert_eq!(
            shown,
            [
                "0 B",
                "1023 B",
                "1.0 KiB",
                "1.5 KiB",
                "10.0 MiB",
                "16383.9 PiB"
            ]
        );
    }

    #[test]
    fn large_numbers_show_three_digits() {
        let shown = [0, 999, 1000, 12_340, 999_999, 1_250_000_000, u64::MAX].map(decimal);
        assert_eq!(
            shown,
            ["0", "999", "1.00 k", "12.3 k", "999 k", "1.25 G", "18.4 E"]
        );
    }

    #[test]
    fn a_table_fits_the_width_it_is_given() {
        let mut table = table(&["NAME", "VALUE"]);
        table.add_row(["a", &"word ".repeat(40)]).set_width(60);
        let text = table_text(&table);
        assert!(text.lines().count() > 2, "nothing wrapped:\n{text}");
        assert!(
            text.lines().all(|line| line.len() <= 60),
            "too wide:\n{text}"
        );
    }

    #[test]
    fn pairs_line_their_values_up() {
        let text = pairs(&[
            ("pool", "web".to_owned()),
            ("address", "10.0.0.2".to_owned()),
        ]);
        assert_eq!(text, "pool:    web\naddress: 10.0.0.2\n");
    }
}
