//! Values under small numbers, which are used again.

/// A number is free again as soon as its value is removed: whoever keeps numbers elsewhere (epoll, timers,
/// queues) must bear that they name something newer.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    /// Puts a value in; its number.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(number) = self.free.pop() {
            self.places[number as usize] = Some(value);
            return number;
        }
        let number = u32::try_from(self.places.len()).expect("limits keep far below that");
        self.places.push(Some(value));
        number
    }

    /// The number that the next value will have.
    #[must_use]
    pub fn next_number(&self) -> u32 {
        let fresh = || u32::try_from(self.places.len()).expect("limits keep far below that");
        self.free.last().copied().unwrap_or_else(fresh)
    }

    /// Takes a value out.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let value = self.places.get_mut(number as usize)?.take()?;
        self.free.push(number);
        if self.free.len() == self.places.len() {
            // Nothing is left: an idle guest costs nothing.
            *self = Self::default();
        }
        Some(value)
    }

    /// The value under a number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&T> {
        self.places.get(number as usize)?.as_ref()
    }

    /// The value under a number.
    #[must_use]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.places.get_mut(number as usize)?.as_mut()
    }

    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..)
            .zip(&self.places)
            .filter_map(|(number, value)| Some((number, value.as_ref()?)))
    }

    /// The numbers of all values, to go through them while they change.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        self.iter().map(|(number, _)| number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again_and_an_empty_slab_holds_no_memory() {
        let mut slab = Slab::default();
        let (first, second) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(first), Some('a'));
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.insert('c'), first);
        assert_eq!(slab.numbers(), [first, second]);
        assert_eq!(slab.get(first), Some(&'c'));
        assert_eq!(slab.get_mut(second), Some(&mut 'b'));
        assert_eq!(slab.len(), 2);
        slab.remove(first);
        slab.remove(second);
        assert!(slab.is_empty());
        assert_eq!(slab.places.capacity(), 0);
    }
}
