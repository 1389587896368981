//! Executed counts of a compiled plan.
