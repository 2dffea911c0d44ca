//! `/v1/responses`, the stateless part: a request becomes a chat request, the chat's answer a response.
//!
//! | module    | holds                                                     |
//! |-----------|-----------------------------------------------------------|
//! | `request` | from a request to the chat request that means the same    |
//! | `items`   | the input: messages, calls and their outputs              |
//! | `answer`  | the response object as it grows                           |
//! | `stream`  | the events that tell a client how it grows                |

mod answer;
mod items;
mod request;
mod stream;

pub use answer::ResponseAnswer;
pub use request::{Translated, translate};
pub use stream::ResponseWriter;
