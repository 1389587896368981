//! dreamc
fn main() {}
