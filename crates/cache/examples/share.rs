//! Two prompts that begin alike: the second one finds the rows of the first in the prefix
//! index and shares their pages.
//!
//! `cargo run -p cache --example share`

use backend::{Batch, Reference};
use cache::{
    GroupPlan, KeptSize, KvLayer, KvPlan, Memory, MemoryPlan, MemorySize, Namespace, PrefixIndex,
    RowKey,
};

fn main() {
    // One layer of full attention: two key/value heads of 16 columns.
    let plan = MemoryPlan {
        groups: vec![GroupPlan {
            window: None,
            layers: vec![KvLayer {
                heads: 2,
                head_dim: 16,
                query_heads: 1,
                edge: None,
            }],
        }],
        delta: vec![],
    };
    let size = MemorySize {
        sequences: 2,
        context: 512,
        step_rows: 256,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    };
    println!("{} bytes are planned", Memory::bytes(&plan, &size));
    let mut memory = Memory::new(&Reference, plan, size);
    let mut index = PrefixIndex::new();

    // The first prompt runs in one step. A model would now fill its rows.
    let prompt: Vec<u32> = (0..200).collect();
    let mut first = memory.open().expect("a sequence is free");
    let mut batch = Batch::default();
    memory
        .push(&mut batch, &mut first, &prompt, prompt.len())
        .expect("the cache has room");
    let everybody = Namespace::default();
    let entry = index.insert(everybody, prompt.iter().copied().map(RowKey::Token));
    println!(
        "the first prompt: {} rows in {} pages",
        first.len(),
        first.n_pages()
    );

    // The second one is like it for 150 tokens: two whole pages, and 22 rows of a third one,
    // which are copied.
    let prompt: Vec<u32> = (0..150).chain(1000..1050).collect();
    let keys: Vec<RowKey> = prompt.iter().copied().map(RowKey::Token).collect();
    let found = index
        .longest(everybody, &keys)
        .expect("it begins like the first");
    assert_eq!((found.entry, found.rows), (entry, 150));
    let rows = memory.forkable(&first, found.rows);
    let mut second = memory
        .fork(&Reference, &first, rows)
        .expect("a sequence is free");
    let mut batch = Batch::default();
    memory
        .push(
            &mut batch,
            &mut second,
            &prompt[rows..],
            prompt.len() - rows,
        )
        .expect("the cache has room");
    println!(
        "the second prompt: {rows} rows shared, {} to run",
        batch.n_rows()
    );
    println!(
        "{} of {} pages are in use",
        memory.pages_used().0,
        memory.pages_used().1
    );
    assert_eq!(memory.pages_used().0, 4 + 2);

    // A sequence gives back what it holds; what is shared stays with the other one.
    drop(first);
    assert_eq!(memory.pages_used().0, 4);
}
