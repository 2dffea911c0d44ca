//! Pickles of plain values, made and read without the pickle module.
//!
//! Most messages are numbers, short text and bytes. Making a pickler for one costs more than what it does, and so does each
//! step across the interpreter. What is written here any unpickler of protocol 5 reads. What is read here may come from any
//! pickler: the containers that it may hold are built as the pickle says, and what holds anything else is left to the pickle
//! module, errors included.

use std::cell::RefCell;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

/// Text and bytes up to this many bytes are plain; longer ones have ways of their own.
const SHORT: usize = 4096;
/// Pickles up to this many bytes are made and read here: of a longer one the values cost more than the start, and what stands in
/// it several times the pickle module writes once.
const LONGEST: usize = 2 * SHORT;

/// Opcodes, by the names that they have in `pickletools`.
mod op {
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const FRAME: u8 = 0x95;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const BINGET: u8 = b'h';
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const NONE: u8 = b'N';
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const SHORT_BINBYTES: u8 = b'C';
    pub(super) const BINBYTES: u8 = b'B';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The pickle of a call `(operation, name, args, {})`; `None` unless all arguments are plain, and short together.
pub(crate) fn envelope(operation: u8, name: &str, args: &Bound<'_, PyTuple>) -> Option<Bytes> {
    written(|out| {
        out.extend_from_slice(&[op::MARK, op::BININT1, operation]);
        put_sized(out, op::SHORT_BINUNICODE, op::BINUNICODE, name.as_bytes())?;
        let count = args.len();
        if count > 3 {
            out.push(op::MARK);
        }
        for value in args.iter_borrowed() {
            put(out, &value)?;
            if out.len() > LONGEST {
                return None;
            }
        }
        out.push(match count {
            0 => op::EMPTY_TUPLE,
            1 => op::TUPLE1,
            2 => op::TUPLE2,
            3 => op::TUPLE3,
            _ => op::TUPLE,
        });
        out.extend_from_slice(&[op::EMPTY_DICT, op::TUPLE]);
        Some(())
    })
}

/// The pickle of a plain value; `None` of any other.
pub(crate) fn plain(value: &Bound<'_, PyAny>) -> Option<Bytes> {
    written(|out| put(out, value))
}

fn written(write: impl FnOnce(&mut Vec<u8>) -> Option<()>) -> Option<Bytes> {
    SCRATCH.with_borrow_mut(|out| {
        out.clear();
        out.extend_from_slice(&[op::PROTO, 5]);
        write(out)?;
        out.push(op::STOP);
        Some(Bytes::copy_from_slice(out))
    })
}

fn put(out: &mut Vec<u8>, value: &Bound<'_, PyAny>) -> Option<()> {
    if value.is_exact_instance_of::<PyBytes>() {
        put_sized(out, op::SHORT_BINBYTES, op::BINBYTES, value.cast_exact::<PyBytes>().ok()?.as_bytes())?;
    } else if value.is_exact_instance_of::<PyString>() {
        // Lone surrogates are no UTF-8.
        put_sized(
            out,
            op::SHORT_BINUNICODE,
            op::BINUNICODE,
            value.cast_exact::<PyString>().ok()?.to_str().ok()?.as_bytes(),
        )?;
    } else if value.is_none() {
        out.push(op::NONE);
    } else if value.is_exact_instance_of::<PyBool>() {
        out.push(if value.cast_exact::<PyBool>().ok()?.is_true() { op::NEWTRUE } else { op::NEWFALSE });
    } else if value.is_exact_instance_of::<PyInt>() {
        let number: i64 = value.extract().ok()?;
        if let Ok(small) = u8::try_from(number) {
            out.extend_from_slice(&[op::BININT1, small]);
        } else if let Ok(medium) = i32::try_from(number) {
            out.push(op::BININT);
            out.extend_from_slice(&medium.to_le_bytes());
        } else {
            out.extend_from_slice(&[op::LONG1, 8]);
            out.extend_from_slice(&number.to_le_bytes());
        }
    } else if value.is_exact_instance_of::<PyFloat>() {
        out.push(op::BINFLOAT);
        out.extend_from_slice(&value.cast_exact::<PyFloat>().ok()?.value().to_be_bytes());
    } else {
        return None;
    }
    Some(())
}

fn put_sized(out: &mut Vec<u8>, short: u8, long: u8, data: &[u8]) -> Option<()> {
    if let Ok(len) = u8::try_from(data.len()) {
        out.extend_from_slice(&[short, len]);
    } else {
        out.push(long);
        out.extend_from_slice(&u32::try_from(data.len()).ok().filter(|len| *len as usize <= SHORT)?.to_le_bytes());
    }
    out.extend_from_slice(data);
    Some(())
}

/// The object that a pickle holds; `None`: the pickle module is to read it.
pub(crate) fn read<'py>(py: Python<'py>, pickle: &[u8]) -> Option<Bound<'py, PyAny>> {
    if pickle.len() > LONGEST {
        return None;
    }
    let mut input = Input(pickle);
    if input.array()? != [op::PROTO, 5] {
        return None;
    }
    let mut machine = Machine { py, stack: Vec::with_capacity(8), marks: Vec::new(), memo: Vec::new() };
    while machine.step(&mut input)? {}
    let Machine { mut stack, marks, .. } = machine;
    let object = stack.pop()?;
    // Else it is no pickle, which is not for us to say.
    (stack.is_empty() && marks.is_empty() && input.0.is_empty()).then_some(object)
}

/// What is still to be read.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }
    fn byte(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }
    fn short(&mut self) -> Option<&'a [u8]> {
        let len = self.byte()?;
        self.take(usize::from(len))
    }
    fn long(&mut self) -> Option<&'a [u8]> {
        let len = u32::from_le_bytes(self.array()?);
        self.take(usize::try_from(len).ok()?)
    }
}

/// The stack machine whose program a pickle is.
struct Machine<'py> {
    py: Python<'py>,
    stack: Vec<Bound<'py, PyAny>>,
    marks: Vec<usize>,
    memo: Vec<Bound<'py, PyAny>>,
}

impl<'py> Machine<'py> {
    /// Follows one opcode. False: that was the end.
    fn step(&mut self, input: &mut Input<'_>) -> Option<bool> {
        let py = self.py;
        let made = match input.byte()? {
            op::FRAME => {
                input.array::<8>()?;
                return Some(true);
            }
            op::STOP => return Some(false),
            op::MEMOIZE => {
                self.memo.push(self.stack.last()?.clone());
                return Some(true);
            }
            op::MARK => {
                self.marks.push(self.stack.len());
                return Some(true);
            }
            op::BINGET => self.memo.get(usize::from(input.byte()?))?.clone(),
            op::NONE => py.None().into_bound(py),
            op::NEWTRUE => PyBool::new(py, true).to_owned().into_any(),
            op::NEWFALSE => PyBool::new(py, false).to_owned().into_any(),
            op::BININT => int(py, i64::from(i32::from_le_bytes(input.array()?))),
            op::BININT1 => int(py, i64::from(input.byte()?)),
            op::BININT2 => int(py, i64::from(u16::from_le_bytes(input.array()?))),
            op::LONG1 => int(py, long(input.short()?)?),
            op::BINFLOAT => PyFloat::new(py, f64::from_be_bytes(input.array()?)).into_any(),
            op::SHORT_BINUNICODE => text(py, input.short()?)?,
            op::BINUNICODE => text(py, input.long()?)?,
            op::SHORT_BINBYTES => PyBytes::new(py, input.short()?).into_any(),
            op::BINBYTES => PyBytes::new(py, input.long()?).into_any(),
            op::EMPTY_TUPLE => PyTuple::empty(py).into_any(),
            op::TUPLE1 => self.tuple(1)?,
            op::TUPLE2 => self.tuple(2)?,
            op::TUPLE3 => self.tuple(3)?,
            op::TUPLE => {
                let mark = self.marks.pop()?;
                let count = self.stack.len().checked_sub(mark)?;
                self.tuple(count)?
            }
            op::EMPTY_LIST => PyList::empty(py).into_any(),
            op::EMPTY_DICT => PyDict::new(py).into_any(),
            op::APPEND => return self.extend(1),
            op::APPENDS => {
                let mark = self.marks.pop()?;
                return self.extend(self.stack.len().checked_sub(mark)?);
            }
            op::SETITEM => return self.update(2),
            op::SETITEMS => {
                let mark = self.marks.pop()?;
                return self.update(self.stack.len().checked_sub(mark)?);
            }
            _ => return None,
        };
        self.stack.push(made);
        Some(true)
    }

    /// Takes the last `count` values off the stack.
    fn tuple(&mut self, count: usize) -> Option<Bound<'py, PyAny>> {
        let from = self.stack.len().checked_sub(count)?;
        PyTuple::new(self.py, self.stack.drain(from..)).ok().map(Bound::into_any)
    }

    /// Appends the last `count` values to the list below them.
    fn extend(&mut self, count: usize) -> Option<bool> {
        let from = self.stack.len().checked_sub(count)?;
        let (below, items) = self.stack.split_at(from);
        let list = below.last()?.cast_exact::<PyList>().ok()?;
        for item in items {
            list.append(item).ok()?;
        }
        self.stack.truncate(from);
        Some(true)
    }

    /// Puts the last `count` values, keys and values in turn, into the dict below them.
    fn update(&mut self, count: usize) -> Option<bool> {
        let from = self.stack.len().checked_sub(count)?;
        let (below, items) = self.stack.split_at(from);
        let dict = below.last()?.cast_exact::<PyDict>().ok()?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return None;
        }
        for [key, value] in pairs {
            dict.set_item(key, value).ok()?;
        }
        self.stack.truncate(from);
        Some(true)
    }
}

fn int(py: Python<'_>, number: i64) -> Bound<'_, PyAny> {
    PyInt::new(py, number).into_any()
}

/// A number in two's complement of up to 64 bits.
fn long(bytes: &[u8]) -> Option<i64> {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut whole = [if negative { 0xff } else { 0 }; 8];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(whole))
}

fn text<'py>(py: Python<'py>, utf8: &[u8]) -> Option<Bound<'py, PyAny>> {
    std::str::from_utf8(utf8).ok().map(|text| PyString::new(py, text).into_any())
}
