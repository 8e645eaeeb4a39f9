//! Pools of numbered, reference-counted pages.

/// Pages of one kind, by number: which are free, and how many owners each other one has.
///
/// Also counts the slots of recurrent state.
#[derive(Clone, Debug)]
pub struct PagePool {
    free: Vec<u32>,
    /// Owners of each page; 0 for a free one.
    owners: Vec<u32>,
}

impl PagePool {
    /// A pool of `n_pages` free pages.
    ///
    /// # Panics
    ///
    /// If there are 2³² − 1 pages or more.
    pub fn new(n_pages: usize) -> Self {
        let n = u32::try_from(n_pages)
            .ok()
            .filter(|&n| n < backend::NO_PAGE)
            .expect("pages fit their numbers");
        PagePool {
            free: (0..n).rev().collect(),
            owners: vec![0; n_pages],
        }
    }

    /// Takes a free page for one owner; `None` if there is none.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.owners[page as usize] = 1;
        Some(page)
    }

    /// Gives `page` one owner more, who reads rows that it has: these never change from now on.
    ///
    /// # Panics
    ///
    /// If the page is free.
    pub fn share(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        assert!(*owners > 0, "page {page} is free, so nobody can share it");
        *owners += 1;
    }

    /// Ends one owner's hold on `page`; the page is free after the last one.
    ///
    /// # Panics
    ///
    /// If the page is free already.
    pub fn give(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        assert!(*owners > 0, "page {page} is free already");
        *owners -= 1;
        if *owners == 0 {
            self.free.push(page);
        }
    }

    /// Owners of `page`.
    pub fn owners(&self, page: u32) -> usize {
        self.owners[page as usize] as usize
    }

    /// Free pages.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// All pages, free or not.
    pub fn n_pages(&self) -> usize {
        self.owners.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_free_after_its_last_owner() {
        let mut pool = PagePool::new(2);
        let page = pool.take().unwrap();
        pool.share(page);
        assert_eq!((pool.owners(page), pool.n_free()), (2, 1));
        pool.give(page);
        assert_eq!((pool.owners(page), pool.n_free()), (1, 1));
        pool.give(page);
        assert_eq!((pool.owners(page), pool.n_free()), (0, 2));
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn a_page_cannot_be_given_back_twice() {
        let mut pool = PagePool::new(1);
        let page = pool.take().unwrap();
        pool.give(page);
        pool.give(page);
    }
}
