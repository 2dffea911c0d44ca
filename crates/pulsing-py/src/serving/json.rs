//! A request's JSON as Python objects: what `json.loads` makes of it, in a fraction of the time where a prompt is long.

use pulsing_gateway::api::{Build, build};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};

/// Longest integer that surely fits in 64 bits, its sign included.
const DIGITS: usize = 18;

/// An object of JSON as `json.loads` reads it. None: it is none, or `json` has to look at it (long integers, keys with
/// escapes, half surrogate pairs, other encodings, more than 64 levels, whatever is wrong with it).
#[pyfunction]
pub(crate) fn read_json<'py>(py: Python<'py>, body: &[u8]) -> Option<Bound<'py, PyAny>> {
    build(std::str::from_utf8(body).ok()?, &mut Objects(py))
}

struct Objects<'py>(Python<'py>);

impl<'py> Build for Objects<'py> {
    type Value = Bound<'py, PyAny>;

    fn object(&mut self, members: Vec<(&str, Self::Value)>) -> Option<Self::Value> {
        let object = PyDict::new(self.0);
        for (key, value) in members {
            object.set_item(key, value).ok()?;
        }
        Some(object.into_any())
    }
    fn array(&mut self, elements: Vec<Self::Value>) -> Option<Self::Value> {
        PyList::new(self.0, elements).ok().map(Bound::into_any)
    }
    fn string(&mut self, text: &str) -> Option<Self::Value> {
        Some(PyString::new(self.0, text).into_any())
    }
    fn other(&mut self, text: &str) -> Option<Self::Value> {
        Some(match text.as_bytes().first()? {
            b't' => PyBool::new(self.0, true).to_owned().into_any(),
            b'f' => PyBool::new(self.0, false).to_owned().into_any(),
            b'n' => self.0.None().into_bound(self.0),
            _ if text.contains(['.', 'e', 'E']) => PyFloat::new(self.0, text.parse().ok()?).into_any(),
            _ if text.len() <= DIGITS => PyInt::new(self.0, text.parse::<i64>().ok()?).into_any(),
            _ => return None,
        })
    }
}
