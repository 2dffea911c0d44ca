//! Requests that wait for one model, key by key.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::account::Account;
use super::gate::Ticket;

/// One request that waits. Letting it through is sending on `go`; who has left has dropped the other end.
pub(super) struct Waiting {
    pub(super) id: u64,
    /// What its key is charged when it is let through.
    pub(super) cost: f64,
    pub(super) go: oneshot::Sender<Ticket>,
}

struct Queue {
    account: Arc<Account>,
    waiting: VecDeque<Waiting>,
}

/// The queue of one model. Whoever was given the least so far, by weight, is next; one key's own requests keep their order.
#[derive(Default)]
pub(super) struct Lane {
    queues: Vec<Queue>,
    waiting: usize,
    /// What the last one let through had been given. Who comes to an idle lane starts there.
    level: f64,
}

impl Lane {
    pub(super) fn len(&self) -> usize {
        self.waiting
    }
    /// Notes that `account` was let through without waiting.
    pub(super) fn passed(&mut self, account: &Account) {
        account.lift(self.level);
        self.level = account.served();
    }
    pub(super) fn push(&mut self, account: &Arc<Account>, waiting: Waiting) {
        self.waiting += 1;
        if let Some(queue) = self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.account, account)) {
            queue.waiting.push_back(waiting);
            return;
        }
        let least = self.queues.iter().map(|queue| queue.account.served()).reduce(f64::min);
        account.lift(least.unwrap_or(self.level));
        self.queues.push(Queue { account: Arc::clone(account), waiting: VecDeque::from([waiting]) });
    }
    /// Who is next. Its key is charged.
    pub(super) fn pop(&mut self) -> Option<Waiting> {
        let least = |one: &(usize, f64), other: &(usize, f64)| one.1.total_cmp(&other.1);
        let served = self.queues.iter().map(|queue| queue.account.served()).enumerate();
        let (at, level) = served.min_by(|one, other| least(one, other))?;
        let waiting = self.queues[at].waiting.pop_front()?;
        self.queues[at].account.charge(waiting.cost);
        if self.queues[at].waiting.is_empty() {
            // In order of arrival, which decides between equals.
            self.queues.remove(at);
        }
        self.level = self.level.max(level);
        self.waiting -= 1;
        Some(waiting)
    }
    /// Takes out one that gave up. False if it is not there any more.
    pub(super) fn remove(&mut self, account: &Arc<Account>, id: u64) -> bool {
        let Some(at) = self.queues.iter().position(|queue| Arc::ptr_eq(&queue.account, account)) else { return false };
        let before = self.queues[at].waiting.len();
        self.queues[at].waiting.retain(|waiting| waiting.id != id);
        let gone = before - self.queues[at].waiting.len();
        self.waiting -= gone;
        if self.queues[at].waiting.is_empty() {
            self.queues.remove(at);
        }
        gone > 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::{Client, Limits};
    use super::*;

    fn clients(weights: &[f64]) -> Vec<Client> {
        let one = |weight: &f64| Client {
            account: Arc::new(Account::new("x")),
            limits: Limits { weight: *weight, ..Limits::default() },
        };
        weights.iter().map(one).collect()
    }
    fn push(lane: &mut Lane, client: &Client, id: u64) {
        lane.push(&client.account, Waiting { id, cost: client.cost(100.0), go: oneshot::channel().0 });
    }
    /// Lets `count` through, each costing 100 tokens; how many of each client, whose ids are a thousand each.
    fn let_through(lane: &mut Lane, clients: &[Client], count: usize) -> Vec<usize> {
        let mut shares = vec![0; clients.len()];
        for _ in 0..count {
            shares[lane.pop().unwrap().id as usize / 1000] += 1;
        }
        shares
    }

    #[test]
    fn s6_keys_share_by_weight_however_many_each_sends() {
        let clients = clients(&[1.0, 1.0, 2.0]);
        let mut lane = Lane::default();
        for id in 0..1000 {
            push(&mut lane, &clients[0], id);
        }
        for id in 0..100 {
            push(&mut lane, &clients[1], 1000 + id);
            push(&mut lane, &clients[2], 2000 + id);
        }
        assert_eq!(let_through(&mut lane, &clients, 100), [25, 25, 50]);
        assert_eq!(lane.len(), 1100);
    }

    #[test]
    fn s6_who_was_idle_has_saved_nothing_up_and_who_was_busy_is_not_shut_out() {
        let clients = clients(&[1.0, 1.0]);
        let mut lane = Lane::default();
        clients[0].account.charge(1e6);
        lane.passed(&clients[0].account);
        for id in 0..50 {
            push(&mut lane, &clients[1], 1000 + id);
            push(&mut lane, &clients[0], id);
        }
        assert_eq!(let_through(&mut lane, &clients, 20), [10, 10]);
    }

    #[test]
    fn c2_who_gives_up_leaves_nothing_behind() {
        let clients = clients(&[1.0]);
        let mut lane = Lane::default();
        for id in 0..3 {
            push(&mut lane, &clients[0], id);
        }
        assert!(lane.remove(&clients[0].account, 1) && !lane.remove(&clients[0].account, 1));
        assert_eq!(lane.pop().unwrap().id, 0);
        assert_eq!(lane.pop().unwrap().id, 2);
        assert!(lane.pop().is_none() && lane.len() == 0 && lane.queues.is_empty());
        assert!(!lane.remove(&clients[0].account, 2));
    }
}
