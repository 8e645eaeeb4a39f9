//! speculate
