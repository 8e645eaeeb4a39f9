//! Conversations through many chat templates: what clients spell differently makes the
//! same prompt, and what they write stays text.

mod forms;
mod instructions;
mod subjects;
