//! Beginnings of texts that have gone, for texts that begin alike.
//!
//! *In*: what caches hold of a prompt, a page of tokens at a time. *Out*: the pages that
//! another text begins with. *Promise*: no more pages than are to be kept, those that were used
//! last; a page is found after the tokens that it was read after, and after no others.

use super::cached::{Cached, Saved};
use crate::model::ModelError;
use std::collections::{BTreeMap, HashMap};

/// The number of a page; 0 stands for the beginning of a text.
type Number = u64;

/// Pages of prompts, each after another or at the beginning of a text.
pub(super) struct Prefixes {
    /// Tokens of a page.
    page: usize,
    /// Pages that are kept, at most.
    most: usize,
    pages: HashMap<Number, Page>,
    /// The page after another that has these tokens.
    behind: HashMap<(Number, Box<[u32]>), Number>,
    /// Pages by the time of their last use. A page was used later than all after it: the first one
    /// here has none after it.
    used: BTreeMap<u64, Number>,
    /// Counts uses and numbers.
    clock: u64,
}

struct Page {
    before: Number,
    tokens: Box<[u32]>,
    used: u64,
    saved: Saved,
}

impl Prefixes {
    /// Empty, for pages of `page` tokens.
    pub(super) fn new(page: usize) -> Self {
        let (pages, behind, used) = (HashMap::new(), HashMap::new(), BTreeMap::new());
        Prefixes { page: page.max(1), most: 0, pages, behind, used, clock: 0 }
    }

    /// Keeps pages of at most `tokens` tokens from now on.
    pub(super) fn keep(&mut self, tokens: usize) {
        self.most = tokens / self.page;
        self.make_room(0);
    }

    /// Tokens that are kept.
    pub(super) fn tokens(&self) -> usize {
        self.pages.len() * self.page
    }

    /// The pages that `text` begins with.
    fn path(&self, text: &[u32]) -> Vec<Number> {
        let mut path = vec![];
        for tokens in text.chunks_exact(self.page) {
            let before = path.last().copied().unwrap_or(0);
            let Some(&next) = self.behind.get(&(before, tokens.into())) else { break };
            path.push(next);
        }
        path
    }

    /// Tokens of a text that are kept: those of whole pages, up to the last one after which a text
    /// may go on.
    pub(super) fn find(&self, text: &[u32]) -> usize {
        let ends = |number: &Number| self.pages.get(number).is_some_and(|page| page.saved.ends());
        self.path(text).iter().rposition(ends).map_or(0, |last| (last + 1) * self.page)
    }

    /// Writes the kept tokens of a text into a row that holds none.
    pub(super) fn restore(&mut self, text: &[u32], to: &mut Cached, row: usize) -> Result<(), ModelError> {
        let path = self.path(text);
        for page in path.iter().filter_map(|number| self.pages.get(number)) {
            to.load_saved(row, &page.saved)?;
        }
        self.touch(&path);
        Ok(())
    }

    /// Keeps the whole pages of a prompt that a row holds.
    pub(super) fn save(&mut self, prompt: &[u32], from: &Cached, row: usize) -> Result<(), ModelError> {
        let prompt = &prompt[..prompt.len().min(self.most.saturating_mul(self.page))];
        let mut path = self.path(prompt);
        self.touch(&path);
        let new = path.len()..prompt.len() / self.page;
        self.make_room(new.len());
        let saved = new.clone().map(|i| from.save(row, i * self.page, (i + 1) * self.page));
        let saved = saved.collect::<Result<Vec<_>, _>>()?;
        for (tokens, saved) in prompt.chunks_exact(self.page).skip(new.start).zip(saved) {
            self.clock += 1;
            let (number, before) = (self.clock, path.last().copied().unwrap_or(0));
            self.behind.insert((before, tokens.into()), number);
            self.used.insert(number, number);
            self.pages.insert(number, Page { before, tokens: tokens.into(), used: number, saved });
            path.push(number);
        }
        self.touch(&path);
        Ok(())
    }

    /// Uses the pages of a path, the last one first.
    fn touch(&mut self, path: &[Number]) {
        for number in path.iter().rev() {
            let Some(page) = self.pages.get_mut(number) else { continue };
            self.clock += 1;
            self.used.remove(&page.used);
            self.used.insert(self.clock, *number);
            page.used = self.clock;
        }
    }

    /// Drops the pages that were used least lately, until there is room for `new` new ones.
    fn make_room(&mut self, new: usize) {
        while self.pages.len() + new > self.most
            && let Some((_, number)) = self.used.pop_first()
        {
            if let Some(page) = self.pages.remove(&number) {
                self.behind.remove(&(page.before, page.tokens));
            }
        }
    }
}
