//! Who is told what each step did.

use speculate::StepRecord;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What one step did, and for whom.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The [number](crate::Request::number) of the request of each of the step's streams.
    pub requests: Vec<u64>,
    /// What the step did.
    pub step: StepRecord,
    /// How long the delivery of what it has brought took, if that went on beside drafting.
    pub delivery: Option<DeliveryTimes>,
}

/// How long a delivery took that went on beside drafting. The time that this saved is the difference.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryTimes {
    /// Time from the first token to the last event.
    pub took: Duration,
    /// Time that the engine waited for it after drafting.
    pub waited: Duration,
}

/// Takes what each step did, in order, on the engine's thread: it must not wait.
#[derive(Clone)]
pub struct StepSink(pub Arc<dyn Fn(StepReport) + Send + Sync>);

impl fmt::Debug for StepSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StepSink(..)")
    }
}
