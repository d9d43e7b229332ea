//! Nodes by number, in chunks each twice as large as the one before: none moves when there are more, and the list of chunks has a
//! fixed size. So nothing is allocated but what the caller brings.

use super::node::{Directory, Leaf};

/// Nodes of the first chunk.
const FIRST: usize = 2;
/// With all of them there is room for a hundred million entries.
const CHUNKS: usize = 22;

pub(crate) trait Node {
    fn vacant() -> Self;
}

#[derive(Debug)]
pub(super) struct Arena<N> {
    chunks: [Option<Box<[N]>>; CHUNKS],
    /// How many there are.
    count: usize,
    /// Numbers that were given back; as much room as there are nodes comes with each chunk.
    free: Vec<u32>,
    /// Numbers from here on were never taken.
    fresh: u32,
}

/// Nodes, and room for their numbers.
#[derive(Debug)]
pub(crate) struct Nodes<N> {
    nodes: Box<[N]>,
    free: Vec<u32>,
}

/// Memory that a set asks for.
#[derive(Debug)]
pub(crate) enum Chunk<V> {
    Leaves(Nodes<Leaf<V>>),
    Directories(Nodes<Directory>),
}

/// How much of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Leaves { nodes: usize, all: usize },
    Directories { nodes: usize, all: usize },
}

impl Need {
    pub(super) fn leaves(nodes: usize, all: usize) -> Self {
        Need::Leaves { nodes, all }
    }

    pub(super) fn directories(nodes: usize, all: usize) -> Self {
        Need::Directories { nodes, all }
    }

    /// Allocates it; `None` when memory runs out, or there are as many chunks as there can be.
    pub(crate) fn allocate<V>(self) -> Option<Chunk<V>> {
        match self {
            Need::Leaves { nodes, all } => Nodes::allocate(nodes, all).map(Chunk::Leaves),
            Need::Directories { nodes, all } => Nodes::allocate(nodes, all).map(Chunk::Directories),
        }
    }
}

impl<N: Node> Nodes<N> {
    fn allocate(count: usize, all: usize) -> Option<Self> {
        if count > FIRST << (CHUNKS - 1) {
            return None;
        }
        let (mut nodes, mut free) = (Vec::new(), Vec::new());
        nodes.try_reserve_exact(count).ok()?;
        free.try_reserve_exact(all).ok()?;
        nodes.resize_with(count, N::vacant);
        let nodes = nodes.into_boxed_slice();
        Some(Nodes { nodes, free })
    }
}

/// Chunk and place in it.
fn place(id: u32) -> (usize, usize) {
    let id = id as usize + FIRST;
    let chunk = (id / FIRST).ilog2();
    (chunk as usize, id - (FIRST << chunk))
}

impl<N: Node> Arena<N> {
    pub(super) const fn new() -> Self {
        Arena {
            chunks: [const { None }; CHUNKS],
            count: 0,
            free: Vec::new(),
            fresh: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Nodes of all chunks.
    fn capacity(&self) -> usize {
        FIRST * ((1_usize << self.count) - 1)
    }

    fn available(&self) -> usize {
        self.free.len() + self.capacity() - self.fresh as usize
    }

    /// What to allocate, as nodes of the next chunk and of all, unless so many can be taken.
    pub(super) fn needs(&self, nodes: usize, need: fn(usize, usize) -> Need) -> Option<Need> {
        let next = FIRST << self.count;
        (self.available() < nodes).then(|| need(next, self.capacity() + next))
    }

    /// Adds a chunk, and returns what is to be freed: the chunk itself if another has come in between.
    pub(super) fn add(&mut self, mut nodes: Nodes<N>) -> Nodes<N> {
        if nodes.nodes.len() == FIRST << self.count {
            nodes.free.extend_from_slice(&self.free);
            std::mem::swap(&mut nodes.free, &mut self.free);
            self.chunks[self.count] = Some(std::mem::take(&mut nodes.nodes));
            self.count += 1;
        }
        nodes
    }

    /// A vacant node.
    pub(super) fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }

    /// The node is vacant again.
    pub(super) fn give(&mut self, id: u32) {
        debug_assert!(self.free.len() < self.free.capacity());
        self.free.push(id);
    }

    pub(super) fn get(&self, id: u32) -> &N {
        let (chunk, at) = place(id);
        match &self.chunks[chunk] {
            Some(nodes) => &nodes[at],
            None => unreachable!("{id} was taken"),
        }
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut N {
        let (chunk, at) = place(id);
        match &mut self.chunks[chunk] {
            Some(nodes) => &mut nodes[at],
            None => unreachable!("{id} was taken"),
        }
    }

    /// Two different nodes.
    pub(super) fn pair(&mut self, a: u32, b: u32) -> (&mut N, &mut N) {
        let ((a_chunk, a), (b_chunk, b)) = (place(a), place(b));
        if a_chunk == b_chunk {
            let nodes = self.chunks[a_chunk].as_deref_mut();
            if let Some(Ok([a, b])) = nodes.map(|nodes| nodes.get_disjoint_mut([a, b])) {
                return (a, b);
            }
        } else if let Ok([Some(a_nodes), Some(b_nodes)]) =
            self.chunks.get_disjoint_mut([a_chunk, b_chunk])
        {
            return (&mut a_nodes[a], &mut b_nodes[b]);
        }
        unreachable!("two nodes that were taken")
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn taken(&self) -> usize {
        self.fresh as usize - self.free.len()
    }
}
