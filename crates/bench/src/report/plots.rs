//! Plots of a record, as SVG text.

use anyhow::{Context, Result};
use plotters::prelude::*;

use crate::{
    record::{Record, Row},
    vsock::{FIGURE_CASES, USER_BUFFER},
};

const SIZE: (u32, u32) = (760, 360);
const COLORS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x5f, 0x0e),
    RGBColor(0x2c, 0x8c, 0x3c),
    RGBColor(0xb0, 0x2a, 0x37),
    RGBColor(0x7b, 0x4f, 0xa3),
    RGBColor(0x66, 0x66, 0x66),
];

/// One line of a plot.
struct Line {
    label: String,
    points: Vec<(f64, f64)>,
}

/// A plot's title and axes.
struct Frame {
    title: &'static str,
    across: &'static str,
    up: &'static str,
}

/// Every plot that the record has samples for.
pub(super) fn all(record: &Record) -> Result<Vec<String>> {
    let mut plots = Vec::new();
    let rows = |metric: &str| -> Vec<&Row> {
        record
            .rows
            .iter()
            .filter(|row| row.metric == metric && !has_guest_in_it(row))
            .collect()
    };
    for (metric, title) in bar_plots(record) {
        let cases = rows(&metric);
        if !cases.is_empty() {
            plots.push(medians(&title, &cases)?);
        }
    }
    let curves: Vec<Line> = rows("ready_at").into_iter().map(fill_curve).collect();
    if !curves.is_empty() {
        let frame = Frame {
            title: "Filling a large pool",
            across: "seconds",
            up: "slots ready",
        };
        plots.push(lines(&frame, &curves)?);
    }
    let buffers = buffer_lines(record);
    if !buffers.is_empty() {
        let frame = Frame {
            title: "vsock: throughput by the size of the user's buffer",
            across: "bytes of the user's buffer, powers of two",
            up: "Gbit/s",
        };
        plots.push(lines(&frame, &buffers)?);
    }
    for (metric, title) in DISTRIBUTIONS {
        let latencies: Vec<Line> = rows(metric).into_iter().map(distribution).collect();
        if !latencies.is_empty() {
            let frame = Frame {
                title,
                across: "microseconds, powers of ten",
                up: "percent of samples",
            };
            plots.push(lines(&frame, &latencies)?);
        }
    }
    Ok(plots)
}

/// Metrics whose samples are plotted one by one.
const DISTRIBUTIONS: [(&str, &str); 4] = [
    ("acquire_us", "Acquiring a lease over the API"),
    ("echo_samples", "64 bytes to the host and back by vsock"),
    ("host_probe", "Round trip of a probe, client on the host"),
    (
        "beyond_probe",
        "Round trip of a probe, client beyond the uplink",
    ),
];

/// Metrics whose medians are compared by bars, with titles.
const BARS: [(&str, &str); 20] = [
    ("fill_per_slot", "Time to build a slot (ms)"),
    ("teardown_per_slot", "Time to tear a slot down (ms)"),
    (
        "tap_to_tap_64_cost",
        "A packet of 64 bytes, TAP to TAP (ns)",
    ),
    (
        "tap_to_tap_1514_cost",
        "A packet of 1514 bytes, TAP to TAP (ns)",
    ),
    ("tap_to_tap_16k_cost", "16 KiB, TAP to TAP (ns)"),
    ("tap_to_tap_64k_cost", "64 KB, TAP to TAP (ns)"),
    (
        "tap_to_veth_64_cost",
        "A packet of 64 bytes, TAP to veth (ns)",
    ),
    ("tap_to_veth_64k_cost", "64 KB, TAP to veth (ns)"),
    ("tcp_64_packets", "Writes of 64 bytes by TCP (per second)"),
    (
        "tcp_64_host_cpu_per_gigabit",
        "Writes of 64 bytes: the host's time per Gbit (ms)",
    ),
    ("tcp_16k_throughput", "Writes of 16 KiB by TCP (Mbit/s)"),
    (
        "tcp_16k_host_cpu_per_gigabit",
        "Writes of 16 KiB: the host's time per Gbit (ms)",
    ),
    (
        "host_ping_added",
        "Added to a round trip, client on the host (us)",
    ),
    ("h2g_4k", "vsock, 4 KiB to the guest (Gbit/s)"),
    ("g2h_4k", "vsock, 4 KiB to the host (Gbit/s)"),
    ("h2g_64k", "vsock, 64 KiB to the guest (Gbit/s)"),
    ("g2h_64k", "vsock, 64 KiB to the host (Gbit/s)"),
    (
        "unix_64k",
        "The limit: 64 KiB by a Unix socket alone (Gbit/s)",
    ),
    ("connects", "vsock, connections opened per second"),
    (
        "relay_cpu_per_gib",
        "The hybrid router's processor time per GiB (s)",
    ),
];

/// The metrics that are plotted as bars: those known by name, and those of clones, whose names tell
/// where the client was and how many guests were active.
fn bar_plots(record: &Record) -> Vec<(String, String)> {
    let known = BARS
        .iter()
        .map(|(metric, title)| ((*metric).to_owned(), (*title).to_owned()));
    let mut plots: Vec<(String, String)> = known.collect();
    for row in &record.rows {
        let kinds = [
            ("_throughput_mean", "mean throughput per client"),
            ("_throughput_p5", "throughput that 95 % of clients exceed"),
            ("_ping_mean", "mean round trip"),
        ];
        for (end, kind) in kinds {
            let Some(start) = row.metric.strip_suffix(end) else {
                continue;
            };
            if plots.iter().all(|(metric, _)| *metric != row.metric) {
                let title = format!("{kind}: {} ({})", start.replace('_', ", "), row.unit);
                plots.push((row.metric.clone(), title));
            }
        }
    }
    plots
}

/// Whether a row says it is of the host's time but has a real guest's in it, as records before 2026-11-29 do.
fn has_guest_in_it(row: &Row) -> bool {
    row.case.ends_with("_linux") && row.metric.ends_with("_host_cpu_per_gigabit")
}

/// Height of a bar with its label, in pixels.
const BAR_HEIGHT: u32 = 34;

/// Bars of medians, with a stroke from the smallest to the largest sample.
fn medians(title: &str, rows: &[&Row]) -> Result<String> {
    let most = rows.iter().map(|row| row.max).fold(0.0, f64::max) * 1.05;
    let count = number(rows.len());
    let bars = u32::try_from(rows.len()).unwrap_or(1) * BAR_HEIGHT;
    let mut text = String::new();
    {
        let size = (SIZE.0, bars + 80);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE).context("cannot draw a plot")?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(30)
            .build_cartesian_2d(0.0..most.max(f64::MIN_POSITIVE), count..0.0)
            .context("cannot draw a plot")?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .draw()
            .context("cannot draw a plot")?;
        for (index, row) in rows.iter().enumerate() {
            let (top, color) = (number(index), COLORS[index % COLORS.len()]);
            let bar = Rectangle::new(
                [(0.0, top + 0.52), (row.median, top + 0.92)],
                color.filled(),
            );
            let spread = vec![(row.min, top + 0.72), (row.max, top + 0.72)];
            let label = format!("{}: {}", row.case, super::figure(row.median));
            chart
                .draw_series([
                    bar.into_dyn(),
                    PathElement::new(spread, BLACK).into_dyn(),
                    Text::new(label, (0.0, top + 0.05), ("sans-serif", 13)).into_dyn(),
                ])
                .context("cannot draw a plot")?;
        }
        area.present().context("cannot draw a plot")?;
    }
    Ok(text)
}

fn lines(frame: &Frame, lines: &[Line]) -> Result<String> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let left = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let right = points()
        .map(|point| point.0)
        .fold(f64::NEG_INFINITY, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).context("cannot draw a plot")?;
        let mut chart = ChartBuilder::on(&area)
            .caption(frame.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(left.min(0.0)..right.max(left + 1e-9), 0.0..top.max(1e-9))
            .context("cannot draw a plot")?;
        chart
            .configure_mesh()
            .x_desc(frame.across)
            .y_desc(frame.up)
            .draw()
            .context("cannot draw a plot")?;
        for (index, line) in lines.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            chart
                .draw_series(LineSeries::new(
                    line.points.iter().copied(),
                    color.stroke_width(2),
                ))
                .context("cannot draw a plot")?
                .label(line.label.clone())
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 14, y)], color.stroke_width(2))
                });
        }
        draw_legend(&mut chart, SeriesLabelPosition::LowerRight)?;
        area.present().context("cannot draw a plot")?;
    }
    Ok(text)
}

type Chart<'area, 'text> = ChartContext<
    'area,
    SVGBackend<'text>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

fn draw_legend<'area, 'text: 'area>(
    chart: &mut Chart<'area, 'text>,
    position: SeriesLabelPosition,
) -> Result<()> {
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .context("cannot draw a plot")
}

/// Throughput of vsock by size of the user's buffer, a line per size of the device's.
fn buffer_lines(record: &Record) -> Vec<Line> {
    let line = |(case, label): (&str, &str)| {
        let rows = record.rows.iter().filter(|row| row.case == case);
        let mut points: Vec<(f64, f64)> = rows
            .filter_map(|row| {
                let bytes: f64 = row.metric.strip_prefix(USER_BUFFER)?.parse().ok()?;
                Some((bytes.log2(), row.median))
            })
            .collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Line {
            label: label.to_owned(),
            points,
        }
    };
    let lines = FIGURE_CASES.into_iter().map(line);
    lines.filter(|line| !line.points.is_empty()).collect()
}

/// Slots that are ready over time. The curve has a point for every fiftieth slot.
fn fill_curve(row: &Row) -> Line {
    let points = row.samples.iter().zip(1..);
    Line {
        label: row.case.clone(),
        points: std::iter::once((0.0, 0.0))
            .chain(points.map(|(seconds, index)| (*seconds, f64::from(index) * 50.0)))
            .collect(),
    }
}

/// The share of samples up to each value, over the value's logarithm.
fn distribution(row: &Row) -> Line {
    let mut sorted = row.samples.clone();
    sorted.sort_by(f64::total_cmp);
    let count = number(sorted.len());
    let points = sorted.iter().zip(1_u32..);
    Line {
        label: row.case.clone(),
        points: points
            .map(|(value, rank)| (value.max(1.0).log10(), f64::from(rank) / count * 100.0))
            .collect(),
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "numbers of rows and samples are far below 2^52"
)]
fn number(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::{super::tests::sample_record, *};

    #[test]
    fn each_kind_of_sample_has_its_plot() {
        let plots = all(&sample_record()).unwrap();
        assert_eq!(plots.len(), 3);
        for plot in plots {
            assert!(
                plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>"),
                "{plot}"
            );
        }
    }

    #[test]
    fn a_real_guest_s_time_stands_beside_no_host_s() {
        let mut record = sample_record();
        for metric in ["tcp_64_host_cpu_per_gigabit", "tcp_64_packets"] {
            for (case, value) in [("kernel", 3345.0), ("kernel_linux", 151_893.0)] {
                record.add(case, metric, "ms", &[value]);
            }
        }
        let plots = all(&record).unwrap();
        let of = |title| plots.iter().find(|plot| plot.contains(title)).unwrap();
        assert!(!of("the host&apos;s time per Gbit").contains("kernel_linux"));
        assert!(of("by TCP (per second)").contains("kernel_linux"));
    }

    #[test]
    fn a_distribution_ends_at_all_samples() {
        let record = sample_record();
        let line = distribution(record.row("acquire_at_rest", "acquire_us").unwrap());
        assert_eq!(line.points.len(), 3);
        assert!(
            (line.points[0].0 - 2.0).abs() < 1e-9,
            "100 µs are ten to the power of two"
        );
        assert_eq!(line.points.last().map(|point| point.1), Some(100.0));
    }
}
