//! Has TCP notice that the other end is gone without a word: a machine without power, a microVM that was killed.
//!
//! While nothing is on its way, TCP asks by itself. Of what is, its own patience says when it is lost, after a quarter of an
//! hour; a shorter one (`TCP_USER_TIMEOUT`) would also end connections whose other end is there and doesn't read. So the
//! kernel is asked what it has heard: who doesn't read says so again and again, who is gone says nothing.

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::net::sockopt as option;
use sandwire_kernel_net::tcp::{self, Sent};
use tokio::{net::TcpStream, time::sleep};

/// How long it may be silent until it is asked, how often it is asked then, and how many times.
const SILENCE: Duration = Duration::from_secs(15);
const BETWEEN: Duration = Duration::from_secs(5);
const TIMES: u32 = 3;

/// How often something has to go unanswered: the other end may just be about to.
const ATTEMPTS_MIN: u8 = 2;

/// Waits until something was on its way for so long, and nothing was heard meanwhile.
pub(crate) async fn unanswered(socket: impl AsFd, at_most: Duration) {
    let mut silence = Silence::default();
    loop {
        sleep(at_most / 4).await;
        // One that can't be asked is none for whoever reads and writes there, either.
        if let Ok(sent) = tcp::sent(&socket)
            && silence.lasts(Instant::now(), &sent) >= at_most
        {
            return;
        }
    }
}

/// Something is on its way, and nothing is heard.
#[derive(Default)]
struct Silence {
    since: Option<Instant>,
}

impl Silence {
    /// How long that lasts already, as far as it was looked at.
    fn lasts(&mut self, now: Instant, sent: &Sent) -> Duration {
        if sent.unacknowledged == 0 && sent.attempts == 0 {
            self.since = None;
            return Duration::ZERO;
        }
        let heard = now.checked_sub(sent.unheard).unwrap_or(now);
        let since = self.since.map_or(now, |since| since.max(heard));
        self.since = Some(since);
        if sent.attempts < ATTEMPTS_MIN {
            return Duration::ZERO;
        }
        now.saturating_duration_since(since)
    }
}

/// Ends a connection some seconds after its other end has gone.
pub(crate) fn end_when_gone(stream: &TcpStream) -> io::Result<()> {
    option::set_tcp_keepidle(stream, SILENCE)?;
    option::set_tcp_keepintvl(stream, BETWEEN)?;
    option::set_tcp_keepcnt(stream, TIMES)?;
    Ok(option::set_socket_keepalive(stream, true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn looks(looks: &[(u32, u32, u8, u32)]) -> Vec<u64> {
        let start = Instant::now() + 3600 * SECOND;
        let mut silence = Silence::default();
        let look = |(at, unacknowledged, attempts, unheard): &(u32, u32, u8, u32)| {
            let sent = Sent {
                unacknowledged: *unacknowledged,
                attempts: *attempts,
                unheard: *unheard * SECOND,
            };
            silence.lasts(start + *at * SECOND, &sent).as_secs()
        };
        looks.iter().map(look).collect()
    }

    #[test]
    fn silence_counts_from_when_something_was_on_its_way() {
        // It had been idle for an hour.
        let lasts = looks(&[
            (0, 0, 0, 3600),
            (15, 1, 1, 3615),
            (30, 1, 4, 3630),
            (45, 1, 5, 3645),
        ]);
        assert_eq!(lasts, [0, 0, 15, 30]);
    }

    #[test]
    fn who_answers_that_it_has_no_room_is_there() {
        let lasts = looks(&[
            (0, 0, 1, 90),
            (15, 0, 0, 10),
            (120, 0, 1, 115),
            (135, 0, 0, 15),
        ]);
        assert_eq!(lasts, [0; 4]);
        // Segments are sent again and acknowledged no further.
        assert_eq!(
            looks(&[(0, 2, 3, 0), (15, 2, 4, 5), (30, 2, 4, 20)]),
            [0, 5, 20]
        );
    }

    #[test]
    fn one_attempt_may_be_about_to_be_answered() {
        assert_eq!(looks(&[(0, 1, 1, 0), (60, 1, 1, 60)]), [0, 0]);
    }
}
