//! Who may learn of a pool, told by the credentials of a connection.
//!
//! Root may do everything; others have what the pool's access rules grant ([`Caller::may`]). The
//! slot service judges leases and ports by itself; listing and changing pools is judged here.

use sandwire_api::pool::{AccessVerb, PoolSpec};
use sandwire_slot::service::Caller;

/// Whether the caller may see the pool and its figures.
pub(crate) fn may_see(caller: Caller, pool: &PoolSpec) -> bool {
    caller.may(AccessVerb::Show, pool) || caller.may(AccessVerb::Manage, pool)
}

/// Whether the caller may do anything with the pool, and so may know that it exists.
pub(crate) fn may_know(caller: Caller, pool: &PoolSpec) -> bool {
    may_see(caller, pool)
        || caller.may(AccessVerb::Acquire, pool)
        || caller.may(AccessVerb::Publish, pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(access: &str) -> PoolSpec {
        let text = format!(
            "name = \"web\"\naccess = [{access}]\n[addresses]\nplan = \"prefix\"\n\
             ipv4 = \"10.64.0.0/16\""
        );
        toml::from_str(&text).unwrap()
    }

    fn user(uid: u32, gid: u32) -> Caller {
        Caller {
            uid,
            gid,
            privileged: uid == 0,
        }
    }

    #[test]
    fn a_pool_without_rules_is_for_root_alone() {
        let pool = pool("");
        assert!(may_see(user(0, 0), &pool));
        assert!(!may_know(user(1000, 0), &pool));
    }

    #[test]
    fn who_may_acquire_knows_the_pool_but_does_not_see_its_figures() {
        let pool = pool("{ verbs = [\"acquire\"], uids = [1000], gids = [2000] }");
        for (caller, granted) in [
            (user(1000, 1), true),
            (user(1001, 2000), true),
            (user(2000, 1000), false),
        ] {
            assert_eq!(may_know(caller, &pool), granted);
            assert!(!may_see(caller, &pool));
        }
    }

    #[test]
    fn who_manages_a_pool_sees_it() {
        let pool = pool("{ verbs = [\"manage\"], uids = [1000] }");
        assert!(may_see(user(1000, 1), &pool));
    }
}
