//! The closed loop: users that send their next request when the last one ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::phase::Phase;

/// A user that cannot connect waits this long, doubling up to a second: a refusing server would otherwise be asked as fast as
/// the machine can, which measures nothing.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Users(JoinSet<()>);

pub(crate) fn start(phase: &Arc<Phase>, users: usize) -> Users {
    let mut set = JoinSet::new();
    for _ in 0..users {
        set.spawn(user(Arc::clone(phase)));
    }
    Users(set)
}

impl Users {
    pub(crate) async fn finished(&mut self) {
        while self.0.join_next().await.is_some() {}
    }
}

async fn user(phase: Arc<Phase>) {
    let mut pause = PAUSE;
    while phase.is_open() {
        // A user's request is due when the user is free.
        let sched = phase.setting.clock.now();
        if phase.request(sched, sched).await {
            pause = PAUSE;
        } else {
            let left = phase.deadline.saturating_sub(phase.setting.clock.now());
            tokio::time::sleep(pause.min(Duration::from_micros(left))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}
