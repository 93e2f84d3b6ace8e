//! In which order apps are called.
//!
//! An app comes after those that it gets packets from, so a packet crosses the whole graph in one breath. What an
//! edge app sends was there before anything was pushed, so nobody waits for it. Apps that depend on nothing, and
//! those in a circle where all depend on another, come by name: the order follows from the graph alone.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

/// Puts apps, given in order of their names, in the order of calls. Each dependency is a pair: who sends, who is
/// sent to.
pub(crate) fn order(apps: usize, dependencies: &[(usize, usize)]) -> Vec<usize> {
    let mut waits_for = vec![0_usize; apps];
    let mut feeds = vec![Vec::new(); apps];
    let mut fed_by = vec![Vec::new(); apps];
    for &(from, to) in dependencies {
        waits_for[to] += 1;
        feeds[from].push(to);
        fed_by[to].push(from);
    }
    let mut ready: BTreeSet<usize> = (0..apps).filter(|&app| waits_for[app] == 0).collect();
    let mut left: BTreeSet<usize> = (0..apps).collect();
    let mut ordered = Vec::with_capacity(apps);
    while let Some(app) = ready
        .pop_first()
        .or_else(|| first_of_a_circle(&left, &fed_by))
    {
        left.remove(&app);
        ordered.push(app);
        for &fed in &feeds[app] {
            waits_for[fed] -= 1;
            if waits_for[fed] == 0 && left.contains(&fed) {
                ready.insert(fed);
            }
        }
    }
    ordered
}

/// Where all that are left wait for others: upstream from the first by name there is a circle, and of that the first.
fn first_of_a_circle(left: &BTreeSet<usize>, fed_by: &[Vec<usize>]) -> Option<usize> {
    let mut app = *left.first()?;
    let mut path = Vec::new();
    let mut seen = BTreeSet::new();
    while seen.insert(app) {
        path.push(app);
        app = *fed_by[app]
            .iter()
            .filter(|from| left.contains(from))
            .min()?;
    }
    path.into_iter().skip_while(|&passed| passed != app).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sends_comes_first_and_names_decide_the_rest() {
        assert_eq!(order(4, &[(3, 0), (0, 2)]), [1, 3, 0, 2]);
        assert_eq!(order(3, &[]), [0, 1, 2]);
    }

    #[test]
    fn a_circle_is_cut_before_its_first_name() {
        assert_eq!(order(3, &[(0, 1), (1, 2), (2, 0)]), [0, 1, 2]);
        assert_eq!(order(4, &[(3, 1), (1, 2), (2, 1), (2, 0)]), [3, 1, 2, 0]);
    }

    #[test]
    fn two_links_between_the_same_apps_are_one_dependency_met() {
        assert_eq!(order(2, &[(1, 0), (1, 0)]), [1, 0]);
    }
}
