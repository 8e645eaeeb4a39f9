//! Which addresses belong to the public internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether the public internet does not route `address` to one machine: it is private, local,
/// shared, reserved, multicast, for documentation or for tests.
///
/// Sources: the IANA special-purpose address registries for IPv4 and IPv6 (RFC 6890), and
/// for multicast RFC 5771 and RFC 4291. Addresses that hold an IPv4 address are as private
/// as that one. A NAT64 prefix that a network chose for itself cannot be told apart.
pub fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_private_v4(address),
        IpAddr::V6(address) => is_private_v6(address),
    }
}

/// [`is_private`] for IPv4.
fn is_private_v4(address: Ipv4Addr) -> bool {
    /// First address of a block, and how many bits it fixes.
    const BLOCKS: &[([u8; 4], u32)] = &[
        ([0, 0, 0, 0], 8),       // this network
        ([10, 0, 0, 0], 8),      // private
        ([100, 64, 0, 0], 10),   // shared by a provider's customers (RFC 6598)
        ([127, 0, 0, 0], 8),     // loopback
        ([169, 254, 0, 0], 16),  // link-local
        ([172, 16, 0, 0], 12),   // private
        ([192, 0, 0, 0], 24),    // protocol assignments
        ([192, 0, 2, 0], 24),    // documentation
        ([192, 88, 99, 0], 24),  // 6to4 relays, deprecated
        ([192, 168, 0, 0], 16),  // private
        ([198, 18, 0, 0], 15),   // benchmarks
        ([198, 51, 100, 0], 24), // documentation
        ([203, 0, 113, 0], 24),  // documentation
        ([224, 0, 0, 0], 4),     // multicast
        ([240, 0, 0, 0], 4),     // reserved, and broadcast
    ];
    BLOCKS.iter().any(|&(first, bits)| {
        let differing = address.to_bits() ^ Ipv4Addr::from(first).to_bits();
        differing >> (32 - bits) == 0
    })
}

/// [`is_private`] for IPv6.
fn is_private_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let inner = |high: u16, low: u16| {
        is_private_v4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
    };
    match segments {
        // IPv4-mapped; the system connects to the IPv4 address.
        [0, 0, 0, 0, 0, 0xffff, high, low] => inner(high, low),
        // NAT64 (RFC 6052); its local-use block 64:ff9b:1::/48 is private.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => inner(high, low),
        // 6to4 (RFC 3056)
        [0x2002, high, low, ..] => inner(high, low),
        // Protocol assignments: Teredo, benchmarks, ORCHID, anycast of protocols.
        [0x2001, 0..0x200, ..] => true,
        // Documentation
        [0x2001, 0xdb8, ..] | [0x3fff, 0..0x1000, ..] => true,
        // Of the rest only 2000::/3 is global unicast: not ::, ::1, 100::/64, 5f00::/16,
        // fc00::/7, fe80::/10, fec0::/10, ff00::/8.
        [first, ..] => first >> 13 != 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every block of the registries, at both ends, and its neighbors outside.
    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        for (private, addresses) in [
            (
                true,
                "0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255",
            ),
            (
                true,
                "127.0.0.1 127.255.255.255 169.254.0.0 169.254.255.255 172.16.0.0 172.31.255.255",
            ),
            (
                true,
                "192.0.0.0 192.0.0.255 192.0.2.0 192.0.2.255 192.88.99.0 192.168.0.0 192.168.255.255",
            ),
            (
                true,
                "198.18.0.0 198.19.255.255 198.51.100.0 198.51.100.255 203.0.113.0 203.0.113.255",
            ),
            (true, "224.0.0.0 239.255.255.255 240.0.0.0 255.255.255.255"),
            (
                false,
                "1.0.0.0 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255",
            ),
            (
                false,
                "128.0.0.0 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0",
            ),
            (
                false,
                "192.0.3.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255",
            ),
            (
                false,
                "198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255",
            ),
            (
                true,
                ":: ::1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:198.18.0.1 ::ffff:0:8.8.8.8",
            ),
            (
                true,
                "64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b:0:0:0:1:808:808 64:ff9b:1::808:808",
            ),
            (
                true,
                "100::1 100:0:0:1::1 2001::1 2001:0:808:808:: 2001:2::1 2001:1ff:ffff::1",
            ),
            (
                true,
                "2001:db8::1 2002:a00:1:: 2002:7f00:1::1 2002:c0a8:101::1 2002:6440:1::",
            ),
            (
                true,
                "3fff::1 3fff:fff:ffff::1 4000::1 5f00::1 fc00::1 fdff::1 fe80::1 febf::1 fec0::1 ff02::1 ff0e::1",
            ),
            (
                false,
                "::ffff:8.8.8.8 64:ff9b::808:808 2001:200::1 2001:4860:4860::8888 2001:db7:ffff::1 2001:db9::1",
            ),
            (
                false,
                "2002:808:808::1 2606:4700::1 2620:4f:8000::1 2a00::1 3ffe::1 3fff:1000::1",
            ),
        ] {
            for address in addresses.split_whitespace() {
                let parsed: IpAddr = address.parse().expect("an address");
                assert_eq!(is_private(parsed), private, "{address}");
            }
        }
    }
}
