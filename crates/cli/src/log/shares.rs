//! Who may have how many lines of a service's log.
//!
//! A line about a guest (`vm`), a caller (`uid`) or what is impaired (`target`) is that one's doing: it has [`ITS_OWN`] share, and its
//! tenant has [`TENANT`] for all. So it is in the relay with a `sender`, whose tenant is its pool, or else the `host` that has
//! named it; with that host itself; and with an address that calls (`caller`), all of which are one tenant, as nobody knows
//! whose they are. What is more is left out, so that nobody pushes out of the log what others have done,
//! or what befell the service itself: lines about nobody, and errors, are always written. How many were left out is told
//! before the next line, whoever's, once whom they were about has room again.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandwire_rate::{Accounts, Share};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Full, Writer},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// Some starts of a guest, each of which has three lines or four. By these alone, 4 MiB last a day.
const ITS_OWN: Share = Share {
    at_once: 20,
    each: Duration::from_secs(4),
};
/// Many guests that start at once; 4 MiB last most of an hour.
const TENANT: Share = Share {
    at_once: 1000,
    each: Duration::from_millis(100),
};
/// Fields that say whom a line is about.
const FIELDS: [&str; 5] = ["vm", "uid", "target", SENDER, CALLER];
const SENDER: &str = "sender";
const CALLER: &str = "caller";
/// Whom a line is about that is about nobody else, and whose doing it is else.
const HOST: &str = "host";
/// What stands between a guest and its tenant.
const OF_TENANT: &str = " of user ";

/// Lines as usual, of everybody no more than its share.
#[derive(Debug)]
pub(super) struct FairFormat<T> {
    lines: Format<Full, T>,
    time: T,
    accounts: Mutex<Accounts<String>>,
}

impl FairFormat<SystemTime> {
    pub(super) fn with_time() -> Self {
        Self {
            lines: Format::default(),
            time: SystemTime,
            accounts: accounts(),
        }
    }
}

impl FairFormat<()> {
    /// For who notes the time of each line itself.
    pub(super) fn without_time() -> Self {
        Self {
            lines: Format::default().without_time(),
            time: (),
            accounts: accounts(),
        }
    }
}

impl<S, N, T> FormatEvent<S, N> for FairFormat<T>
where
    T: FormatTime,
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let about = About::of(event);
        let told = {
            let accounts = self.accounts.lock();
            let mut accounts = accounts.unwrap_or_else(PoisonError::into_inner);
            admit(&mut accounts, about.as_ref(), Instant::now())
        };
        let Some(told) = told else {
            return Ok(());
        };
        for (name, lines) in told {
            self.time.format_time(&mut writer)?;
            let place = module_path!();
            writeln!(
                writer,
                "  WARN {place}: too many lines, which were left out left_out={lines} {name}"
            )?;
        }
        self.lines.format_event(context, writer, event)
    }
}

/// Whom a line is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct About {
    name: String,
    tenant: Option<String>,
    host: Option<String>,
}

impl About {
    fn of(event: &Event<'_>) -> Option<Self> {
        // What says more than usual is somebody's wish, and an error the operator's business.
        if ![Level::WARN, Level::INFO].contains(event.metadata().level()) {
            return None;
        }
        let mut about = Self::default();
        event.record(&mut about);
        about.settled()
    }

    fn note(&mut self, field: &str, value: &dyn fmt::Debug) {
        if field == HOST {
            self.host = Some(format!("{field}={value:?}"));
        } else if FIELDS.contains(&field) {
            self.name = format!("{field}={value:?}");
            self.tenant = tenant_of(field, &self.name);
        }
    }

    /// Once all fields are noted.
    fn settled(mut self) -> Option<Self> {
        match self.host.take() {
            Some(host) if self.name.is_empty() => self.name = host,
            // What it says its senders are called.
            Some(host) => self.tenant = Some(format!("senders of {host}")),
            None => {}
        }
        (!self.name.is_empty()).then_some(self)
    }

    /// Whose shares it takes.
    fn parties(&self) -> Vec<(String, Share)> {
        let tenant = self.tenant.clone().map(|tenant| (tenant, TENANT));
        std::iter::once((self.name.clone(), ITS_OWN))
            .chain(tenant)
            .collect()
    }
}

impl Visit for About {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.note(field.name(), value);
    }
}

fn tenant_of(field: &str, name: &str) -> Option<String> {
    match field {
        CALLER => Some("callers".to_owned()),
        SENDER => name.rsplit_once('/').map(|(pool, _)| pool.to_owned()),
        _ => {
            let (_, tenant) = name.rsplit_once(OF_TENANT)?;
            Some(format!("user={tenant}"))
        }
    }
}

/// Until it was told, nothing is forgotten.
fn accounts() -> Mutex<Accounts<String>> {
    Mutex::new(Accounts::new(Duration::MAX))
}

/// Whether a line is written; and before it, of whom so many were left out.
fn admit(
    accounts: &mut Accounts<String>,
    about: Option<&About>,
    now: Instant,
) -> Option<Vec<(String, u64)>> {
    let parties = about.map(About::parties).unwrap_or_default();
    if !accounts.admits(&parties, now) {
        return None;
    }
    // Before this line takes what room there is.
    let told = accounts.left_out(now);
    accounts.take(&parties, now);
    Some(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(name: &str, tenant: u32) -> About {
        About {
            name: format!("vm={name} of user {tenant}"),
            tenant: Some(format!("user={tenant}")),
            host: None,
        }
    }

    #[test]
    fn who_has_had_its_share_leaves_others_theirs_and_is_told_of_later() {
        let mut accounts = Accounts::new(Duration::MAX);
        let start = Instant::now();
        let (loud, quiet) = (guest("a", 1), guest("b", 1));
        let written = (0..500).filter(|_| admit(&mut accounts, Some(&loud), start).is_some());
        assert_eq!(written.count(), 20);
        assert_eq!(admit(&mut accounts, Some(&quiet), start), Some(Vec::new()));
        assert_eq!(admit(&mut accounts, None, start), Some(Vec::new()));
        let later = start + ITS_OWN.each;
        let told = vec![(loud.name.clone(), 480)];
        assert_eq!(admit(&mut accounts, Some(&loud), later), Some(told));
        assert_eq!(admit(&mut accounts, Some(&loud), later), None);
        // Whoever's line is next.
        let told = vec![(loud.name, 1)];
        assert_eq!(admit(&mut accounts, None, later + ITS_OWN.each), Some(told));
    }

    #[test]
    fn many_guests_of_one_tenant_leave_other_tenants_their_lines() {
        let mut accounts = Accounts::new(Duration::MAX);
        let start = Instant::now();
        let written = (0..5000).filter(|number| {
            let one = guest(&format!("a{number}"), 1);
            admit(&mut accounts, Some(&one), start).is_some()
        });
        assert_eq!(written.count(), 1000);
        assert!(admit(&mut accounts, Some(&guest("a", 2)), start).is_some());
        let later = start + TENANT.each;
        let told = vec![("user=1".to_owned(), 4000)];
        assert_eq!(admit(&mut accounts, None, later), Some(told));
    }

    /// What a line says, and whom it is about.
    fn of(fields: &[(&'static str, &str)]) -> Option<About> {
        let mut about = About::default();
        for (name, value) in fields {
            about.note(name, &format_args!("{value}"));
        }
        about.settled()
    }

    #[test]
    fn a_sender_has_a_pool_or_a_host_above_it_and_strangers_have_each_other() {
        let about = |name: &str, tenant: Option<&str>| {
            let (name, tenant) = (name.to_owned(), tenant.map(str::to_owned));
            let host = None;
            Some(About { name, tenant, host })
        };
        let lease = about("sender=web/a7", Some("sender=web"));
        assert_eq!(of(&[("sender", "web/a7"), ("destination", "x")]), lease);
        let named = about("sender=web/a7", Some("senders of host=a"));
        assert_eq!(of(&[("host", "a"), ("sender", "web/a7")]), named);
        assert_eq!(of(&[("sender", "web/a7"), ("host", "a")]), named);
        assert_eq!(of(&[("sender", "batch")]), about("sender=batch", None));
        assert_eq!(of(&[("host", "a"), ("from", "x")]), about("host=a", None));
        let stranger = about("caller=192.0.2.1", Some("callers"));
        assert_eq!(of(&[("caller", "192.0.2.1"), ("port", "7")]), stranger);
        assert_eq!(of(&[("vm", "a of user 1")]), Some(guest("a", 1)));
        assert_eq!(of(&[("error", "x")]), None);
    }
}
