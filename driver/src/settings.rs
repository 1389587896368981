//! The machine that the stand-in pretends to be, from the environment.

use std::path::PathBuf;

/// `STANDIN` as words:
/// `card=sm_90 processors=108 cards=2 memory=1000000 version=12040 log=FILE timing=early checks=all
/// nvrtc=FILE product=2000 product=wrong fault=CALL:NUMBER:CODE spoil=HOW:KERNEL lost=2 given=all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Compute capability, as in `sm_90`: (9, 0).
    pub card: (u32, u32),
    /// Multiprocessors of each card.
    pub processors: u32,
    /// How many cards there are.
    pub cards: u32,
    /// Bytes of memory of each.
    pub memory: u64,
    /// The answer of `cuDriverGetVersion`: 1000 times the major and 10 times the minor version.
    pub version: i32,
    /// Where to write down what happened.
    pub log: Option<PathBuf>,
    /// Work is done as soon as it is given, which is legal, too.
    pub early: bool,
    /// Races between threads are looked for as well.
    pub races: bool,
    /// Microseconds that a product of cuBLASLt's takes by the clock of events, where any kernel
    /// takes 1000.
    pub product: u64,
    /// Products of cuBLASLt's are taken for zero.
    pub wrong: bool,
    /// The NVRTC to wrap.
    pub nvrtc: Option<PathBuf>,
    /// Calls that fail.
    pub faults: Vec<Fault>,
    /// Of the waits for events on streams that compute the one of that number (from 1) is left out;
    /// 0 leaves out all.
    pub lost: Option<u64>,
    /// Whether the log has all that is given to streams.
    pub given: bool,
    /// Kernels that are not what they were.
    pub spoils: Vec<(Spoil, String)>,
}

/// The defect of kernels whose names begin so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spoil {
    /// They do nothing.
    Wrong,
    /// They do not end.
    Hang,
    /// They read where nothing is.
    Fault,
    /// They cannot be launched.
    Launch,
    /// They do not compile.
    Compile,
}

/// A failure to order: the call of that name and number (from 1) gives the code; `kernel` and
/// `product` count kernels and products of cuBLASLt's as they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// `cuLaunchKernel`, ..., or `kernel`.
    pub call: String,
    /// Which of them.
    pub number: u64,
    /// A `CUresult`, or a `cublasStatus_t` of a call of cuBLASLt's.
    pub code: u32,
}

impl Default for Settings {
    /// One Ampere card.
    fn default() -> Self {
        Settings {
            card: (8, 0),
            // As many as texts are cut for that no GPU was opened for, so that bits are those of
            // the interpreter.
            processors: 132,
            cards: 1,
            memory: 80 << 30,
            version: 13000,
            log: None,
            early: false,
            races: false,
            product: 500,
            wrong: false,
            nvrtc: None,
            faults: vec![],
            lost: None,
            given: false,
            spoils: vec![],
        }
    }
}

impl Settings {
    /// Those of `STANDIN`, or which word of it is wrong.
    pub fn of_environment() -> Result<Self, String> {
        Settings::parse(&std::env::var("STANDIN").unwrap_or_default())
    }

    /// The same from a text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut settings = Settings::default();
        for word in text.split_whitespace() {
            settings.word(word).ok_or_else(|| format!("STANDIN: `{word}` is no setting"))?;
        }
        Ok(settings)
    }

    /// Whether a kernel is spoiled so.
    pub fn spoils(&self, how: Spoil, kernel: &str) -> bool {
        self.spoils.iter().any(|(own, begin)| *own == how && kernel.starts_with(begin.as_str()))
    }

    fn word(&mut self, word: &str) -> Option<()> {
        let (key, value) = word.split_once('=')?;
        match key {
            "card" => {
                let number: u32 = value.strip_prefix("sm_")?.parse().ok()?;
                self.card = (number / 10, number % 10);
            }
            "processors" => self.processors = value.parse().ok()?,
            "cards" => self.cards = value.parse().ok()?,
            "memory" => self.memory = value.parse().ok()?,
            "version" => self.version = value.parse().ok()?,
            "log" => self.log = Some(value.into()),
            "timing" => self.early = value == "early",
            "checks" => self.races = value == "all",
            "product" if value == "wrong" => self.wrong = true,
            "product" => self.product = value.parse().ok()?,
            "lost" => self.lost = Some(value.parse().ok()?),
            "given" => self.given = value == "all",
            "nvrtc" => self.nvrtc = Some(value.into()),
            "fault" => {
                let mut parts = value.split(':');
                self.faults.push(Fault {
                    call: parts.next()?.into(),
                    number: parts.next()?.parse().ok()?,
                    code: parts.next()?.parse().ok()?,
                });
            }
            "spoil" => {
                let (how, kernel) = value.split_once(':')?;
                let how = match how {
                    "wrong" => Spoil::Wrong,
                    "hang" => Spoil::Hang,
                    "fault" => Spoil::Fault,
                    "launch" => Spoil::Launch,
                    "compile" => Spoil::Compile,
                    _ => return None,
                };
                self.spoils.push((how, kernel.into()));
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_settings() {
        let settings =
            Settings::parse("card=sm_90 cards=2 memory=5 fault=kernel:3:700 timing=early").unwrap();
        assert_eq!((settings.card, settings.cards, settings.memory, settings.early), ((9, 0), 2, 5, true));
        assert_eq!(settings.faults, [Fault { call: "kernel".into(), number: 3, code: 700 }]);
        let settings = Settings::parse("spoil=hang:product").unwrap();
        assert!(settings.spoils(Spoil::Hang, "product_k") && !settings.spoils(Spoil::Wrong, "product_k"));
        let settings = Settings::parse("lost=2 given=all").unwrap();
        assert_eq!((settings.lost, settings.given), (Some(2), true));
        for wrong in ["card", "lost=all", "spoil=odd:product", "card=90", "colour=red", "fault=kernel"] {
            assert!(Settings::parse(wrong).unwrap_err().contains(wrong));
        }
    }
}
