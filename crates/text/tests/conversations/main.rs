//! Conversations through many chat templates: what clients spell differently makes the
//! same prompt, and what they write stays text.

mod control;
mod forms;
mod instructions;
mod subjects;
