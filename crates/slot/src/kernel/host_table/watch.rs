//! Hears of the table's deletion, so that it isn't missing until the next inspection: whoever sets up a firewall anew may
//! flush everybody's tables.

use std::{thread, time::Duration};

use sandwire_kernel_net::nft::DeletionWatcher;

use crate::error::NetworkError;

/// How soon it is noticed that nobody listens any more.
const WATCH_AT_MOST: Duration = Duration::from_secs(5);
/// Between two that are told: where others change so much that not all is heard, it may have been ours each time.
const PAUSE: Duration = Duration::from_millis(100);

/// Tells of deletions from now on. To be called by a thread in the host's namespace.
pub(in crate::kernel) fn watch(
    instance: &str,
    tell: Box<dyn Fn(bool) -> bool + Send>,
) -> Result<(), NetworkError> {
    let watcher = DeletionWatcher::new(&super::name(instance))?;
    thread::Builder::new()
        .name("host table".to_owned())
        .spawn(move || watch_until_unwanted(watcher, &tell))
        .map(drop)
        .map_err(|error| NetworkError::Kernel {
            operation: "start",
            object: "a thread that watches the host's table".to_owned(),
            source: Box::new(error),
        })
}

fn watch_until_unwanted(mut watcher: DeletionWatcher, tell: &dyn Fn(bool) -> bool) {
    loop {
        match watcher.deleted(WATCH_AT_MOST) {
            Ok(is_deleted) if tell(is_deleted) => {
                if is_deleted {
                    thread::sleep(PAUSE);
                }
            }
            Ok(_) => return,
            Err(error) => {
                tracing::error!(%error, "the host's table is looked after by inspections alone");
                return;
            }
        }
    }
}
