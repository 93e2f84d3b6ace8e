//! The oldest kernel that identities are for.

use std::time::Duration;

use sandwire_testlab::{guest::kernel::Series, lab};

const DEADLINE: Duration = Duration::from_secs(900);

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn the_oldest_kernel_takes_the_programs() {
    lab::run_on(Series::Linux6_1, DEADLINE, |_| {
        sandwire_identity::probe()
            .and_then(|()| sandwire_identity::probe_tcp_only())
            .and_then(|()| sandwire_identity::probe_receivers())
    });
}
