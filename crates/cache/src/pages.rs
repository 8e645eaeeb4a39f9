//! A pool of numbered pages.

/// Which pages of a group are free.
#[derive(Clone, Debug)]
pub struct PagePool {
    free: Vec<u32>,
    pages: usize,
}

impl PagePool {
    /// A pool of `pages` free pages.
    ///
    /// # Panics
    ///
    /// If there are 2³² − 1 pages or more.
    pub fn new(pages: usize) -> Self {
        let pages_u32 = u32::try_from(pages)
            .ok()
            .filter(|&n| n < backend::NO_PAGE)
            .expect("pages fit their numbers");
        PagePool {
            free: (0..pages_u32).rev().collect(),
            pages,
        }
    }

    /// Takes a free page.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives `page` back.
    pub fn give(&mut self, page: u32) {
        debug_assert!(
            (page as usize) < self.pages && !self.free.contains(&page),
            "a page of this pool, taken"
        );
        self.free.push(page);
    }

    /// Free pages.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// All pages.
    pub fn n_pages(&self) -> usize {
        self.pages
    }
}
