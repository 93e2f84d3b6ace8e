//! What a connection or a socket takes up of what there is for all, until it ends or somebody else has its place.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::fair::{Fair, Part};

/// Who has how many. Whoever loses one hears of it.
pub(crate) type Rooms = Arc<Fair<Arc<Notify>>>;

/// One of them; given back when dropped.
pub(crate) struct Room {
    _part: Part<Arc<Notify>>,
    lost: Arc<Notify>,
    /// How many others were ended for it.
    pub(crate) displaced: u64,
}

impl Room {
    /// Takes one, if need be from who has most, who is told. None if all are taken and nobody has more than the sender would.
    pub(crate) fn take(of: &Rooms, host: &Arc<str>, sender: &Arc<str>) -> Option<Self> {
        let lost = Arc::<Notify>::default();
        let (part, displaced) = of.take(host, sender, lost.clone())?;
        if let Some(displaced) = &displaced {
            displaced.key.notify_one();
        }
        Some(Self {
            _part: part,
            lost,
            displaced: displaced.is_some().into(),
        })
    }

    /// Waits until another one has it. For one who waits, once.
    pub(crate) async fn lost(&self) {
        self.lost.notified().await;
    }
}
