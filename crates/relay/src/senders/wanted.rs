//! Addresses of nobody that is known, for which the daemon is asked out of turn. Pure.
//!
//! A new lease is to be known with its first packet. What nobody has sends on and on, from as many addresses as its sender
//! likes, and each question has the daemon list all leases: of an address that stays unknown it is asked ever more seldom,
//! and of few addresses at all. The others are found by the question of each second.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Addresses that are remembered.
const MOST: usize = 64;
/// After the second question, which is asked at once as the first is; and after each one twice as much.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Those of which the daemon was asked in vain.
#[derive(Default)]
pub(super) struct Wanted(HashMap<IpAddr, Asked>);

struct Asked {
    times: u32,
    /// The answers that there had been when it was last asked.
    round: u64,
    /// When it may be asked again.
    due: Instant,
}

impl Wanted {
    /// Whether the daemon is to be asked for an unknown address, after so many answers; that counts as asked.
    pub(super) fn is_to_be_asked(&mut self, address: IpAddr, round: u64, now: Instant) -> bool {
        let times = match self.0.get(&address) {
            Some(asked) if asked.round == round || now < asked.due => return false,
            Some(asked) => asked.times,
            None => 0,
        };
        if times == 0 && self.0.len() >= MOST {
            self.forget_old(now);
            if self.0.len() >= MOST {
                return false;
            }
        }
        let asked = Asked {
            times: times + 1,
            round,
            due: now + pause_after(times + 1),
        };
        self.0.insert(address, asked);
        true
    }

    /// Forgets those that are known by now.
    pub(super) fn forget_known(&mut self, is_known: impl Fn(&IpAddr) -> bool) {
        self.0.retain(|address, _| !is_known(address));
    }

    /// Forgets those of which nothing was heard for long since they might have been asked for again.
    fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, asked| now < asked.due + PAUSE_MAX);
    }
}

/// A round that runs already may have asked before a lease was there, so the first two go without one.
fn pause_after(times: u32) -> Duration {
    if times < 2 {
        return Duration::ZERO;
    }
    let doubled = 2_u32.saturating_pow(times - 2);
    PAUSE_MIN.saturating_mul(doubled).min(PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from(0x0a40_0000 + number).into()
    }

    #[test]
    fn who_stays_unknown_is_asked_for_ever_more_seldom() {
        let mut wanted = Wanted::default();
        let start = Instant::now();
        // A datagram each millisecond for ten minutes, and an answer of the daemon each 50 ms.
        let asked: Vec<u64> = (0..600_000)
            .filter(|at| {
                let now = start + Duration::from_millis(*at);
                wanted.is_to_be_asked(address(1), at / 50, now)
            })
            .collect();
        assert_eq!(asked[..6], [0, 50, 150, 350, 750, 1550]);
        assert!(asked.len() < 22, "{asked:?}");
    }

    #[test]
    fn ever_new_addresses_are_asked_for_no_more_than_so_many_times() {
        let mut wanted = Wanted::default();
        let start = Instant::now();
        let mut in_a_minute = [0; 10];
        for at in 0..600_000 {
            let now = start + Duration::from_millis(at);
            let is_asked = wanted.is_to_be_asked(address(u32::try_from(at).unwrap()), at / 50, now);
            in_a_minute[usize::try_from(at / 60_000).unwrap()] += usize::from(is_asked);
        }
        assert!(
            in_a_minute.iter().all(|asked| *asked <= MOST),
            "{in_a_minute:?}"
        );
        assert!(wanted.0.len() <= MOST);
    }

    #[test]
    fn who_is_known_makes_room_and_is_asked_for_anew_once_it_is_gone() {
        let mut wanted = Wanted::default();
        let now = Instant::now();
        let ask =
            |wanted: &mut Wanted, number, round| wanted.is_to_be_asked(address(number), round, now);
        for number in 0..u32::try_from(MOST).unwrap() {
            assert!(ask(&mut wanted, number, 1));
        }
        assert!(!ask(&mut wanted, 1000, 1), "there is no room");
        assert!(ask(&mut wanted, 1, 2) && !ask(&mut wanted, 1, 3));
        wanted.forget_known(|known| *known == address(1));
        assert!(ask(&mut wanted, 1000, 3) && !ask(&mut wanted, 1, 3));
        wanted.forget_known(|known| *known == address(1000));
        assert!(ask(&mut wanted, 1, 3));
    }
}
