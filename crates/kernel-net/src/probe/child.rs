//! Whether the kernel makes children of interfaces: macvlan, ipvlan.

use crate::{
    Error,
    interface::{self, ChildDevice, ChildInterface},
    netlink::{Request, Socket},
    netns::Home,
};

const PARENT: &str = "probe0";

/// Makes a child in a namespace of its own, which goes with it. Takes some milliseconds.
///
/// # Errors
/// The kernel can't; the thread is back home.
pub fn check(home: &Home, device: ChildDevice) -> Result<(), Error> {
    let _inside = home.unshare()?;
    let mut socket = Socket::route()?;
    let mut request = Request::new();
    interface::create_bridge(&mut request, PARENT, None);
    socket.execute(request)?;
    let parent = interface::find(&mut socket, PARENT)?;
    let parent = parent.ok_or_else(|| Error::missing_interface(PARENT))?;
    let child = ChildInterface {
        device,
        name: "probe1",
        parent: parent.index,
        parent_namespace: None,
        mac: [0x02, 0, 0, 0, 0, 1],
        mtu: 1500,
    };
    let mut request = Request::new();
    child.create(&mut request);
    socket.execute(request)
}
