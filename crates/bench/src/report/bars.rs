//! What the project promises, and whether a record reaches it.

use crate::record::Record;

/// A promise, compared with a record.
pub(super) struct Verdict {
    /// What the promise is about.
    pub(super) what: String,
    /// The promise in words.
    pub(super) bound: String,
    /// What the record says.
    pub(super) value: f64,
    /// Whether it is kept.
    pub(super) is_reached: bool,
}

enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

use Bound::{AtLeast, AtMost};

/// Promises about ratios.
const RATIOS: &[(&str, Bound)] = &[
    ("netns_fill_speedup", AtLeast(20.0)),
    ("fill_flatness_v4", AtLeast(0.8)),
    ("fill_flatness_dual", AtLeast(0.65)),
    ("host_fill_speedup", AtLeast(100.0)),
    ("ebpf_netns_fill_speedup", AtLeast(18.0)),
    ("fill_flatness_host", AtLeast(0.5)),
    ("ebpf_host_vs_recipe_64", AtMost(0.48)),
    ("ebpf_netns_vs_recipe_64", AtMost(0.6)),
    ("ebpf_host_vs_recipe_64k", AtMost(0.68)),
    ("xdp_vs_recipe_64", AtMost(0.28)),
    ("ping_added_ebpf_vs_recipe", AtMost(0.5)),
    ("throughput_ebpf_host_vs_basic_beyond", AtLeast(1.0)),
    ("throughput_ebpf_host_vs_basic_host", AtLeast(0.93)),
    ("throughput_1000_mean_vs_basic", AtLeast(0.97)),
    ("throughput_1000_p5_vs_basic", AtLeast(0.9)),
    ("stream_64_ebpf_vs_kernel_nat", AtLeast(1.35)),
    ("stream_16k_ebpf_vs_xdp_generic", AtLeast(3.0)),
    ("h2g_4k_vs_vhost_device", AtLeast(2.0)),
    ("g2h_4k_vs_vhost_device", AtLeast(2.0)),
    ("g2h_64k_vs_uds_limit", AtLeast(0.7)),
    ("h2g_64k_vs_uds_limit", AtLeast(0.5)),
    ("echo_p50_vs_bare_hops", AtMost(1.3)),
    ("echo_p99_vs_bare_hops", AtMost(1.5)),
    ("echo_p99_us_polling", AtMost(100.0)),
    ("relay_cpu_vs_copy", AtMost(0.6)),
    ("throughput_100_vms_vs_1", AtLeast(0.9)),
    // What a well-behaved guest that wants as much would leave it.
    ("neighbour_beside_hostile_vs_alone", AtLeast(0.5)),
    ("idle_vm_kib", AtMost(100.0)),
    ("basic1_mpps", AtLeast(40.0)),
    ("basic1_like_seed_mpps", AtLeast(32.0)),
    ("pass_app_ns", AtMost(3.0)),
    ("forward_vs_raw", AtLeast(2.0)),
    ("forward_mpps", AtLeast(0.4)),
    ("forward_gbps", AtLeast(5.0)),
    ("forward_added_rtt_us_sleeping", AtMost(100.0)),
    ("forward_added_rtt_us_polling", AtMost(20.0)),
    ("delay_error_over_floor_us", AtMost(100.0)),
    ("delay_error_over_floor_us_captured", AtMost(100.0)),
    ("delay_error_p99_us_polling", AtMost(100.0)),
    ("rate_error_percent", AtMost(1.0)),
    ("link_memory_vs_in_flight", AtMost(2.0)),
    ("cni_add_p50_ms", AtMost(5.0)),
    ("cni_add_30_p50_ms", AtMost(50.0)),
    ("identity_vs_bare_per_cpu", AtLeast(0.99)),
    ("identity_connect_added_us", AtMost(2.0)),
    ("identity_bind_added_us", AtMost(2.0)),
    ("identity_tcp_vs_bare_per_cpu", AtLeast(0.99)),
    ("identity_tcp_connect_added_us", AtMost(2.0)),
    ("identity_tcp_bind_added_us", AtMost(2.0)),
    ("veth_ebpf_vs_bare", AtLeast(0.9)),
    ("veth_ebpf_vs_veth_kernel", AtLeast(1.1)),
    ("tcp_vs_stunnel", AtLeast(1.5)),
    ("udp_kpps", AtLeast(200.0)),
];

/// Promises about medians of rows: case, metric, bound.
const MEDIANS: &[(&str, &str, Bound)] = &[
    ("acquire_at_rest", "acquire_p50_us", AtMost(300.0)),
    ("acquire_at_rest", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_during_refill", "acquire_p50_us", AtMost(300.0)),
    ("acquire_during_refill", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_during_teardown", "acquire_p50_us", AtMost(300.0)),
    ("acquire_during_teardown", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_30_clients", "acquire_p99_us", AtMost(10_000.0)),
    ("teardown", "teardown_per_slot", AtMost(2.0)),
    ("teardown_host", "teardown_per_slot", AtMost(1.0)),
    ("adopt", "adopt_ready", AtMost(3.0)),
];

/// Promises about the largest sample of rows: case, metric, bound.
const LARGEST: &[(&str, &str, Bound)] = &[
    ("fill_host", "longest_wait", AtMost(100.0)),
    ("teardown_host", "longest_wait", AtMost(100.0)),
];

/// Compares a record with every promise that it has figures for.
pub(super) fn verdicts(record: &Record) -> Vec<Verdict> {
    let ratios = RATIOS.iter().filter_map(|(name, bound)| {
        let value = *record.ratios.get(*name)?;
        Some(bound.judge((*name).to_owned(), value))
    });
    let medians = MEDIANS.iter().filter_map(|(case, metric, bound)| {
        let row = record.row(case, metric)?;
        Some(bound.judge(format!("{case} {metric}"), row.median))
    });
    let largest = LARGEST.iter().filter_map(|(case, metric, bound)| {
        let row = record.row(case, metric)?;
        Some(bound.judge(format!("{case} {metric}"), row.max))
    });
    ratios.chain(medians).chain(largest).collect()
}

impl Bound {
    fn judge(&self, what: String, value: f64) -> Verdict {
        let (bound, is_reached) = match self {
            AtLeast(least) => (format!("at least {least}"), value >= *least),
            AtMost(most) => (format!("at most {most}"), value <= *most),
        };
        Verdict {
            what,
            bound,
            value,
            is_reached,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostFacts;

    #[test]
    fn the_relay_is_judged() {
        let mut record = Record::new("relay", HostFacts::default(), [].into());
        record.insert_ratio("tcp_vs_stunnel", 1.83);
        record.insert_ratio("udp_kpps", 144.0);
        let verdicts = verdicts(&record);
        let judged: Vec<_> = verdicts
            .iter()
            .map(|one| (&*one.what, one.is_reached))
            .collect();
        assert_eq!(judged, [("tcp_vs_stunnel", true), ("udp_kpps", false)]);
    }

    #[test]
    fn a_bound_is_kept_at_its_very_value() {
        for bound in [AtLeast(2.0), AtMost(2.0)] {
            assert!(bound.judge(String::new(), 2.0).is_reached);
        }
        assert!(!AtLeast(2.0).judge(String::new(), 1.9).is_reached);
        assert!(!AtMost(2.0).judge(String::new(), 2.1).is_reached);
    }

    #[test]
    fn a_figure_that_is_no_number_keeps_no_promise() {
        for bound in [AtLeast(2.0), AtMost(2.0)] {
            assert!(!bound.judge(String::new(), f64::NAN).is_reached);
        }
    }
}
