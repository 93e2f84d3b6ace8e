//! Plots of a record, as SVG text.

use anyhow::{Context, Result};
use plotters::prelude::*;

use crate::record::{Record, Row};

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
            .filter(|row| row.metric == metric)
            .collect()
    };
    let fill = rows("fill_per_slot");
    if !fill.is_empty() {
        plots.push(medians("Time to build a slot (ms)", &fill)?);
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
    let latencies: Vec<Line> = rows("acquire_us").into_iter().map(distribution).collect();
    if !latencies.is_empty() {
        let frame = Frame {
            title: "Acquiring a lease over the API",
            across: "microseconds, powers of ten",
            up: "percent of requests",
        };
        plots.push(lines(&frame, &latencies)?);
    }
    Ok(plots)
}

/// Bars of medians, with a stroke from the smallest to the largest sample.
fn medians(title: &str, rows: &[&Row]) -> Result<String> {
    let most = rows.iter().map(|row| row.max).fold(0.0, f64::max) * 1.1;
    let count = number(rows.len());
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).context("cannot draw a plot")?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d(0.0..count, 0.0..most.max(f64::MIN_POSITIVE))
            .context("cannot draw a plot")?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .draw()
            .context("cannot draw a plot")?;
        for (index, row) in rows.iter().enumerate() {
            let (left, color) = (number(index), COLORS[index % COLORS.len()]);
            let bar = Rectangle::new(
                [(left + 0.2, 0.0), (left + 0.8, row.median)],
                color.filled(),
            );
            let spread = [(left + 0.5, row.min), (left + 0.5, row.max)];
            let series = chart
                .draw_series([
                    bar.into_dyn(),
                    PathElement::new(spread.to_vec(), BLACK).into_dyn(),
                ])
                .context("cannot draw a plot")?;
            series
                .label(format!("{}: {}", row.case, super::figure(row.median)))
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled())
                });
        }
        draw_legend(&mut chart, SeriesLabelPosition::UpperRight)?;
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
