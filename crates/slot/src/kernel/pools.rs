//! Pools coming, changing and going on the host.
//!
//! Those whose sandboxes have children of other interfaces need nothing of the host but the data path's maps: no
//! address, route or rule leads to them.

use sandwire_api::slot::DataPath;

use super::{
    KernelNetwork, Ordering, Worker, host,
    hosted::{HostState, Hosted},
    lock,
};
use crate::{error::NetworkError, plan::Plan};

impl KernelNetwork {
    /// Prepares the host for a pool; if that fails, takes back what was done for one that `is_new`. Sandboxes of another
    /// one may be running, whose packets need whatever there is.
    pub(super) fn prepare_pool(
        &self,
        plan: &Plan,
        from: Option<DataPath>,
        is_new: bool,
    ) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        let name = plan.spec.name.to_string();
        if plan.spec.device.is_child() {
            let ebpf = self.open_ebpf()?;
            self.with_worker(|worker| self.follow_redirects(ebpf, worker))?;
            state.children.insert(name, plan.number);
            return Ok(());
        }
        let pool = Hosted {
            plan: plan.clone(),
            from,
        };
        let prepared = self.prepare_hosted(&state, &pool, is_new);
        state.expect_no_longer(&name);
        match prepared {
            Ok(()) => {
                state.refused.remove(&name);
                state.pools.insert(name, pool);
                Ok(())
            }
            Err(error) => {
                if !is_new {
                    state.refused.insert(name, pool);
                }
                Err(error)
            }
        }
    }

    fn prepare_hosted(
        &self,
        state: &HostState,
        pool: &Hosted,
        is_new: bool,
    ) -> Result<(), NetworkError> {
        self.open_ebpf_for(pool, state)?;
        let beside = state.beside(pool.plan.spec.name.as_str());
        let prepare = |worker: &mut Worker| {
            let shared = host::add_pool(self.instance(), worker, pool, &beside)?;
            self.shared.store(shared.0, Ordering::Relaxed);
            match pool.serves_ebpf() {
                true => self.attach_host(worker, shared, pool.uses_xdp() || state.uses_xdp()),
                false => Ok(()),
            }
        };
        self.with_worker(|worker| {
            host::check_pool(self.instance(), worker, &pool.plan)?;
            prepare(worker).map_err(|error| {
                if !is_new {
                    return error;
                }
                match host::remove_pool(self.instance(), worker, pool, &beside) {
                    Ok(()) => error,
                    Err(undone) => NetworkError::Several(vec![error, undone]),
                }
            })
        })
    }

    pub(super) fn take_back_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        let name = plan.spec.name.as_str();
        if plan.spec.device.is_child() {
            state.children.remove(name);
            return Ok(());
        }
        let refused = state.refused.remove(name);
        let pool = state.pools.remove(name).or(refused);
        let pool = pool.unwrap_or_else(|| Hosted {
            plan: plan.clone(),
            from: None,
        });
        let beside = state.beside(name);
        let done =
            self.with_worker(|worker| host::remove_pool(self.instance(), worker, &pool, &beside));
        if !beside.need_shared()
            && let Some(ebpf) = self.ebpf.get()
        {
            // Nobody's packets need it any more; it comes back with the next pool.
            return match (done, ebpf.detach()) {
                (Err(error), Err(other)) => Err(NetworkError::Several(vec![error, other])),
                (done, detached) => done.and(detached),
            };
        }
        done
    }

    pub(super) fn bring_pool_to(
        &self,
        plan: &Plan,
        from: Option<DataPath>,
    ) -> Result<(), NetworkError> {
        if plan.spec.device.is_child() {
            // Its policies are the data path's alone.
            return Ok(());
        }
        let mut state = lock(&self.host);
        let name = plan.spec.name.to_string();
        let after = Hosted {
            plan: plan.clone(),
            from,
        };
        let Some(before) = state.pools.get(&name).cloned() else {
            return Err(NetworkError::Conflict {
                object: format!("pool {name}"),
                with: "the host, which is not prepared for it".to_owned(),
                advice: "try again".to_owned(),
            });
        };
        self.open_ebpf_for(&after, &state)?;
        let beside = state.beside(&name);
        let others_need_shared = beside.need_shared();
        let change = |worker: &mut Worker| {
            let shared = host::change_pool(self.instance(), worker, &before, &after, &beside)?;
            self.shared.store(shared.0, Ordering::Relaxed);
            match after.serves_ebpf() {
                true => self.attach_host(worker, shared, state.uses_xdp()),
                false => Ok(()),
            }
        };
        self.with_worker(|worker| {
            change(worker).inspect_err(|_| {
                // The table's part comes first, and so is as it was even if another step fails again.
                let back = host::change_pool(self.instance(), worker, &after, &before, &beside);
                if let Err(error) = back {
                    tracing::error!(pool = name, %error, "a pool's part of the host may be half changed");
                }
            })
        })?;
        let is_last = !after.serves_ebpf() && !others_need_shared;
        // The host is as it says, whatever comes of the rest.
        state.pools.insert(name, after);
        match self.ebpf.get().filter(|_| is_last) {
            Some(ebpf) => ebpf.detach(),
            None => Ok(()),
        }
    }
}
