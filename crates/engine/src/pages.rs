//! Who is told what the prefix cache holds.

use cache::PageChange;
use std::fmt;
use std::sync::Arc;

/// Takes changes of the prefix cache's pages, in order, on the engine's thread: it must not wait.
#[derive(Clone)]
pub struct PageSink(pub Arc<dyn Fn(Vec<PageChange>) + Send + Sync>);

impl fmt::Debug for PageSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageSink(..)")
    }
}
