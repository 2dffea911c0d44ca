//! Tells under way to the actors of one node, at most so many unaccepted each (R3).
//!
//! A tell has no answer that could slow its caller down, so credit does: each tell spends one, and the callee gives it back
//! when the message has a place in the mailbox. Without credit a tell waits here, in this process, and whoever sent it waits
//! for that. Behind it waits what the same sender has for the same actor, asks included (R2); nobody else does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::id::ActorId;

/// Tells of one node to one actor that may be under way without a place in its mailbox: as many as a mailbox holds.
pub const TELL_WINDOW: u32 = 256;

/// Accounts of all actors of one node. `M` is what is sent.
pub struct Tells<M>(Mutex<Books<M>>);

struct Books<M> {
    /// Nothing is sent before the way is open.
    open: bool,
    accounts: BTreeMap<ActorId, Account<M>>,
    /// Asks that wait behind tells.
    asks: usize,
}

struct Account<M> {
    credit: u32,
    waiting: VecDeque<Waiting<M>>,
    /// Someone is sending what waited, one by one and without the lock: what comes meanwhile goes behind it.
    flushing: bool,
}

struct Waiting<M> {
    sender: Option<ActorId>,
    message: M,
    /// `None`: an ask.
    ticket: Option<Arc<Ticket>>,
}

impl<M> Account<M> {
    fn new() -> Self {
        Self { credit: TELL_WINDOW, waiting: VecDeque::new(), flushing: false }
    }
    fn is_settled(&self) -> bool {
        self.credit == TELL_WINDOW && self.waiting.is_empty() && !self.flushing
    }
}

impl<M> Tells<M> {
    /// Accounts that are `open` at once, or when [`open`](Self::open) is called.
    pub fn new(open: bool) -> Self {
        Self(Mutex::new(Books { open, accounts: BTreeMap::new(), asks: 0 }))
    }

    /// Sends a tell with `send`, or lets it wait: then its ticket tells when it was sent.
    ///
    /// # Errors
    /// `MailboxFull` if it would have to wait for credit and `no_wait` is set.
    pub fn tell(
        &self,
        actor: ActorId,
        sender: Option<ActorId>,
        message: M,
        no_wait: bool,
        send: impl FnOnce(M),
    ) -> Result<Option<Arc<Ticket>>> {
        {
            let mut books = self.0.lock();
            let open = books.open;
            let account = books.accounts.entry(actor).or_insert_with(Account::new);
            if !open || account.credit == 0 || account.flushing || !account.waiting.is_empty() {
                if no_wait && open && account.credit == 0 {
                    return Err(Error::MailboxFull { actor, capacity: TELL_WINDOW as usize });
                }
                let ticket = Arc::new(Ticket::default());
                account.waiting.push_back(Waiting { sender, message, ticket: Some(Arc::clone(&ticket)) });
                return Ok(Some(ticket));
            }
            account.credit -= 1;
        }
        send(message);
        Ok(None)
    }

    /// Gives an ask back to be sent now, or keeps it behind the tells of its sender that wait.
    pub fn ask(&self, actor: ActorId, sender: Option<ActorId>, message: M) -> Option<M> {
        let mut books = self.0.lock();
        let Some(account) = books.accounts.get_mut(&actor) else { return Some(message) };
        if !account.flushing && account.waiting.iter().all(|waiting| waiting.sender != sender) {
            return Some(message);
        }
        account.waiting.push_back(Waiting { sender, message, ticket: None });
        books.asks += 1;
        None
    }

    /// Forgets asks that wait and are not wanted any more.
    pub fn forget_asks(&self, unwanted: impl Fn(&M) -> bool) {
        let mut books = self.0.lock();
        if books.asks == 0 {
            return;
        }
        let mut forgotten = Vec::new();
        for account in books.accounts.values_mut() {
            let unwanted = |waiting: &Waiting<M>| waiting.ticket.is_none() && unwanted(&waiting.message);
            while let Some(n) = account.waiting.iter().position(unwanted) {
                forgotten.extend(account.waiting.remove(n));
            }
        }
        books.asks -= forgotten.len();
        drop(books);
        // What they hold may call back: never under the lock.
        drop(forgotten);
    }

    /// Forgets a tell that waits.
    pub fn withdraw(&self, actor: ActorId, ticket: &Arc<Ticket>) {
        let mut books = self.0.lock();
        let Some(account) = books.accounts.get_mut(&actor) else { return };
        let this = |waiting: &Waiting<M>| waiting.ticket.as_ref().is_some_and(|held| Arc::ptr_eq(held, ticket));
        let withdrawn = account.waiting.iter().position(this).and_then(|n| account.waiting.remove(n));
        books.tidy(actor);
        drop(books);
        drop(withdrawn);
    }

    /// The way is open: what waits is sent.
    pub fn open(&self, mut send: impl FnMut(M)) {
        let actors: Vec<ActorId> = {
            let mut books = self.0.lock();
            books.open = true;
            books.accounts.keys().copied().collect()
        };
        for actor in actors {
            self.flush(actor, 0, &mut send);
        }
    }

    /// `count` tells found a place: as many more may be sent.
    pub fn granted(&self, actor: ActorId, count: u32, mut send: impl FnMut(M)) {
        self.flush(actor, count, &mut send);
    }

    /// The actor has ended: its tells fail, and asks behind them go their way to be refused there.
    pub fn ended(&self, actor: ActorId, send: impl FnMut(M)) {
        let account = {
            let mut books = self.0.lock();
            let account = books.accounts.remove(&actor);
            books.asks -= account.iter().flat_map(|a| &a.waiting).filter(|waiting| waiting.ticket.is_none()).count();
            account
        };
        let (tells, asks): (VecDeque<_>, VecDeque<_>) =
            account.into_iter().flat_map(|a| a.waiting).partition(|waiting| waiting.ticket.is_some());
        for ticket in tells.into_iter().filter_map(|waiting| waiting.ticket) {
            ticket.finish(Err(Error::ActorStopped { actor, begun: false }));
        }
        asks.into_iter().map(|waiting| waiting.message).for_each(send);
    }

    /// The way is closed for good: what waits fails with `error`. Returns how many tells were sent and may not have arrived.
    pub fn close(&self, error: &Error) -> u64 {
        let accounts = {
            let mut books = self.0.lock();
            books.asks = 0;
            std::mem::take(&mut books.accounts)
        };
        let mut under_way = 0;
        for account in accounts.into_values() {
            under_way += u64::from(TELL_WINDOW - account.credit);
            for ticket in account.waiting.into_iter().filter_map(|waiting| waiting.ticket) {
                ticket.finish(Err(error.clone()));
            }
        }
        under_way
    }

    fn flush(&self, actor: ActorId, mut granted: u32, send: &mut impl FnMut(M)) {
        let mut mine = false;
        loop {
            let next = {
                let mut guard = self.0.lock();
                let books = &mut *guard;
                let Some(account) = books.accounts.get_mut(&actor) else { return };
                account.credit = account.credit.saturating_add(std::mem::take(&mut granted)).min(TELL_WINDOW);
                if account.flushing && !mine {
                    return;
                }
                let first = account.waiting.front().map(|waiting| waiting.ticket.is_none());
                match first.filter(|ask| books.open && (*ask || account.credit > 0)) {
                    Some(ask) => {
                        account.flushing = true;
                        mine = true;
                        account.credit -= u32::from(!ask);
                        books.asks -= usize::from(ask);
                        account.waiting.pop_front()
                    }
                    None => {
                        account.flushing = false;
                        books.tidy(actor);
                        return;
                    }
                }
            };
            if let Some(Waiting { message, ticket, .. }) = next {
                send(message);
                if let Some(ticket) = ticket {
                    ticket.finish(Ok(()));
                }
            }
        }
    }
}

impl<M> Books<M> {
    /// Actors nobody tells anything any more are forgotten.
    fn tidy(&mut self, actor: ActorId) {
        if self.accounts.get(&actor).is_some_and(Account::is_settled) {
            self.accounts.remove(&actor);
        }
    }
}

type Callback = Box<dyn FnOnce(Result<()>) + Send>;

/// How a tell that waits comes to its end: sent, or not.
#[derive(Default)]
pub struct Ticket(Mutex<Outcome>);

#[derive(Default)]
enum Outcome {
    #[default]
    Open,
    Awaited(Callback),
    Known(Result<()>),
    Told,
}

impl Ticket {
    fn finish(&self, result: Result<()>) {
        let callback = {
            let mut outcome = self.0.lock();
            match std::mem::replace(&mut *outcome, Outcome::Told) {
                Outcome::Open => {
                    *outcome = Outcome::Known(result);
                    return;
                }
                Outcome::Awaited(callback) => callback,
                Outcome::Known(_) | Outcome::Told => return,
            }
        };
        callback(result);
    }
    fn on_done(&self, callback: Callback) {
        let result = {
            let mut outcome = self.0.lock();
            match std::mem::replace(&mut *outcome, Outcome::Told) {
                Outcome::Known(result) => result,
                Outcome::Told => return,
                Outcome::Open | Outcome::Awaited(_) => {
                    *outcome = Outcome::Awaited(callback);
                    return;
                }
            }
        };
        callback(result);
    }
}

/// Where a tell waits.
pub trait TellQueue: Send + Sync {
    /// Forgets a tell that waits.
    fn withdraw(&self, actor: ActorId, ticket: &Arc<Ticket>);
}

/// A tell that waits for its actor to have room. Dropped, it is withdrawn; if it was sent meanwhile nothing happens.
pub struct PendingTell {
    queue: Weak<dyn TellQueue>,
    actor: ActorId,
    ticket: Arc<Ticket>,
}

impl PendingTell {
    pub(crate) fn new(queue: Weak<dyn TellQueue>, actor: ActorId, ticket: Arc<Ticket>) -> Self {
        Self { queue, actor, ticket }
    }
    /// Runs `callback` once the message is on its way, or cannot be any more; at once if that is known. Must not block. It does
    /// not run after the tell was withdrawn.
    pub fn on_done(&self, callback: impl FnOnce(Result<()>) + Send + 'static) {
        self.ticket.on_done(Box::new(callback));
    }
    /// Waits until the message is on its way.
    ///
    /// # Errors
    /// `ActorStopped`, `ConnectFailed`, `ConnectionLost`, `ShutDown`: it was not sent.
    pub async fn sent(self) -> Result<()> {
        let (tx, rx) = tokio::sync::oneshot::channel();
        self.on_done(move |result| {
            let _ = tx.send(result);
        });
        rx.await.unwrap_or(Err(Error::ShutDown))
    }
}

impl Drop for PendingTell {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.withdraw(self.actor, &self.ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ActorId = ActorId(1);
    const ME: Option<ActorId> = Some(ActorId(7));
    const OTHER: Option<ActorId> = Some(ActorId(8));

    fn full() -> Tells<u32> {
        let tells = Tells::new(true);
        for n in 0..TELL_WINDOW {
            assert!(tells.tell(A, ME, n, false, |_| {}).unwrap().is_none());
        }
        tells
    }

    #[test]
    fn test_r2_asks_wait_behind_their_senders_tells_and_no_others() {
        let tells = full();
        assert_eq!(tells.ask(A, ME, 1), Some(1), "nothing waits");
        assert!(tells.tell(A, ME, 1000, false, |_| {}).unwrap().is_some());
        assert_eq!(tells.ask(A, ME, 1001), None);
        assert_eq!(tells.ask(A, OTHER, 2), Some(2));
        assert!(tells.tell(A, ME, 1002, false, |_| {}).unwrap().is_some());
        tells.forget_asks(|n| *n == 9);
        let mut sent = Vec::new();
        tells.granted(A, 1, |n| sent.push(n));
        assert_eq!(sent, [1000, 1001]);
        tells.granted(A, 1, |n| sent.push(n));
        assert_eq!(sent, [1000, 1001, 1002]);
        tells.granted(A, TELL_WINDOW, |n| sent.push(n));
        assert!(tells.0.lock().accounts.is_empty(), "settled accounts are forgotten");
    }

    #[test]
    fn test_r3_without_credit_no_wait_is_refused_and_others_end_with_the_actor_or_the_way() {
        let tells = full();
        assert!(matches!(tells.tell(A, ME, 1, true, |_| {}), Err(Error::MailboxFull { .. })));
        let waits = |tells: &Tells<u32>| tells.tell(A, ME, 1, false, |_| {}).unwrap().unwrap();
        let outcome = |ticket: Arc<Ticket>| {
            let (tx, rx) = std::sync::mpsc::channel();
            ticket.on_done(Box::new(move |result| tx.send(result).unwrap()));
            rx.recv().unwrap()
        };
        let ticket = waits(&tells);
        assert_eq!(tells.ask(A, ME, 2), None);
        let mut sent = Vec::new();
        tells.ended(A, |n| sent.push(n));
        assert_eq!((outcome(ticket), sent), (Err(Error::ActorStopped { actor: A, begun: false }), vec![2]));

        let tells = full();
        let (ticket, gone) = (waits(&tells), waits(&tells));
        tells.withdraw(A, &gone);
        let lost = Error::ConnectionLost { addr: "a".into(), reason: "r".into() };
        assert_eq!(tells.close(&lost), u64::from(TELL_WINDOW));
        assert_eq!(outcome(ticket), Err(lost));
    }

    #[test]
    fn what_comes_while_the_way_is_not_open_is_sent_in_order_when_it_is() {
        let tells = Tells::new(false);
        for n in 0..3 {
            assert!(tells.tell(A, ME, n, true, |_| {}).unwrap().is_some());
        }
        let mut sent = Vec::new();
        tells.granted(A, 1, |n| sent.push(n));
        assert!(sent.is_empty());
        tells.open(|n| sent.push(n));
        assert_eq!(sent, [0, 1, 2]);
        assert!(tells.tell(A, ME, 3, false, |_| {}).unwrap().is_none());
    }
}
