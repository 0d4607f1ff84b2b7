//! The scripts on a real server make the same changes as the model, and the mistakes of a setup
//! are named.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;

use tollgate_cluster::parts::model::{NoAnswer, Store};
use tollgate_cluster::parts::{Beat, PartAnswer, PartAsk, WHOLE};
use tollgate_rates::testing::TestRedis;
use tollgate_rates::{RateServer, RateServerError, RedisAddress};

const RATES: [&str; 3] = ["requests_per_minute tenant - acme", "tokens_per_minute key - k", "x"];
const GATEWAYS: u32 = 3;

/// Random numbers from a seed: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

fn server(redis: &TestRedis) -> RateServer {
    let address = RedisAddress::new(&redis.url(), None, None).expect("an address");
    RateServer::new(address, "test".to_owned())
}

fn random_ask(random: &mut Random, call: u64, parts: u64) -> PartAsk {
    let claim = match random.below(4) {
        0 => random.below(parts + 1),
        1 => (parts + random.below(WHOLE / 4)).min(WHOLE),
        _ => parts,
    };
    let sometimes = |random: &mut Random, bound| match random.below(3) {
        0 => 0,
        _ => random.below(bound),
    };
    PartAsk {
        call,
        claim,
        give: sometimes(random, WHOLE / 8),
        room: sometimes(random, WHOLE),
        need_level: sometimes(random, 2 * WHOLE),
        need_parts: sometimes(random, WHOLE),
        least: sometimes(random, WHOLE / 4),
        spare: sometimes(random, WHOLE / 2),
        fill: [0, 1, 997, 60_000, 86_400_000][random.below(5) as usize],
        size: 1 + random.below(1_000_000),
    }
}

#[tokio::test]
async fn scripts_change_the_store_as_the_model() {
    let Some(redis) = TestRedis::start() else { return };
    for seed in 0..15 {
        redis.run::<String>(&["FLUSHALL"]);
        let (mut server, mut model) = (server(&redis), Store::default());
        let mut random = Random(seed);
        let (mut now, mut calls) = (1_800_000_000_000, [0_u64; GATEWAYS as usize]);
        let mut parts: BTreeMap<(u32, usize), u64> = BTreeMap::new();
        let mut born = 1;
        for step in 0..300 {
            now = match random.below(40) {
                0 => now + random.below(5_000),
                1 => now - random.below(1_500),
                _ => now + random.below(300),
            };
            // Model and server must agree on the time.
            server.set_time(now);
            let number = 1 + random.below(GATEWAYS.into()) as u32;
            let place = format!("seed {seed}, step {step}");
            if random.below(3) == 0 {
                let told = if random.below(3) == 0 { 0 } else { born };
                let gateways = 1 + random.below(4) as u32;
                let is_first = random.below(20) == 0;
                let beat = Beat { number, gateways, is_first, told };
                let mut answer = server.beat(&beat).await.expect("a beat");
                answer.wanted.sort();
                assert_eq!(answer, model.beat(now, 1, &beat), "{place}");
                born = answer.born;
                continue;
            }
            let which = random.below(RATES.len() as u64) as usize;
            let call = &mut calls[number as usize - 1];
            // Sometimes a call that comes late.
            *call = if random.below(10) == 0 { call.saturating_sub(2) } else { *call + 1 };
            let had = parts.get(&(number, which)).copied().unwrap_or(0);
            let ask = random_ask(&mut random, *call, had);
            // Sometimes one from before the store was born.
            let meant = if random.below(30) == 0 { born - 1 } else { born };
            let from = (number, meant);
            let answer = server.ask(from, &[(RATES[which].to_owned(), ask)]).await;
            let answer: Result<PartAnswer, NoAnswer> = match answer {
                Ok(answers) => answers[0].ok_or(NoAnswer::Stale),
                Err(RateServerError::Unknown) => Err(NoAnswer::Unknown),
                Err(error) => panic!("{place}: {error}"),
            };
            let of_model = model.ask(now, from, RATES[which], &ask);
            assert_eq!(answer, of_model, "{place}: {ask:?}");
            assert!(model.is_sound(RATES[which]), "{place}: {ask:?}: {model:?}");
            if let Ok(answer) = answer {
                parts.insert((number, which), answer.parts);
            }
        }
    }
}

#[tokio::test]
async fn server_of_another_cluster_is_refused() {
    let Some(redis) = TestRedis::start() else { return };
    let beat = Beat { number: 1, gateways: 1, is_first: true, told: 0 };
    server(&redis).beat(&beat).await.expect("the first cluster");
    let address = RedisAddress::new(&redis.url(), None, None).unwrap();
    let error = RateServer::new(address, "other".to_owned()).beat(&beat).await.unwrap_err();
    assert!(error.is_mistake(), "{error}");
    assert!(error.to_string().contains("used by another cluster; name another database"));
}

#[tokio::test]
async fn server_mistakes_are_named() {
    let Some(redis) = TestRedis::start_with(&["--requirepass", "secret"]) else { return };
    let beat = Beat { number: 1, gateways: 1, is_first: true, told: 0 };
    for (password, expected) in [(None, "NOAUTH"), (Some("wrong"), "Password")] {
        let address = RedisAddress::new(&redis.url(), password, None).unwrap();
        let error = RateServer::new(address, "test".to_owned()).beat(&beat).await.unwrap_err();
        assert!(error.to_string().contains("refuses the gateway"), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.is_mistake(), "{error:?}");
    }
    let address = RedisAddress::new(&redis.url(), Some("secret"), None).unwrap();
    let mut server = RateServer::new(address, "test".to_owned());
    redis.run::<String>(&["CONFIG", "SET", "maxmemory", "100mb"]);
    redis.run::<String>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let error = server.beat(&beat).await.unwrap_err();
    assert!(error.is_mistake() && error.to_string().contains("allkeys-lru"), "{error}");
    redis.run::<String>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    server.beat(&beat).await.expect("nothing is evicted");
    redis.run::<String>(&["REPLICAOF", "127.0.0.1", "1"]);
    let address = RedisAddress::new(&redis.url(), Some("secret"), None).unwrap();
    let error = RateServer::new(address, "test".to_owned()).beat(&beat).await.unwrap_err();
    assert!(error.is_mistake() && error.to_string().contains("replica"), "{error}");
    redis.kill();
    let error = server.beat(&beat).await.unwrap_err();
    assert!(!error.is_mistake() && error.to_string().contains("does not answer"), "{error}");
}

/// A certificate of an authority for a name, each in PEM.
fn certificate(name: &str) -> (String, String, String) {
    let mut authority = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let authority_pem = authority.self_signed(&authority_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &issuer).unwrap();
    (authority_pem, leaf.pem(), key.serialize_pem())
}

#[tokio::test]
async fn server_must_prove_its_name_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    for (name, is_right) in [("localhost", true), ("elsewhere.example.com", false)] {
        let (authority, leaf, key) = certificate(name);
        std::fs::write(file("leaf"), leaf).unwrap();
        std::fs::write(file("key"), key).unwrap();
        let port_text = port.to_string();
        let options = [
            ["--tls-port", &port_text],
            ["--tls-cert-file", &file("leaf")],
            ["--tls-key-file", &file("key")],
            ["--tls-ca-cert-file", &file("leaf")],
            ["--tls-auth-clients", "no"],
        ];
        let Some(_redis) = TestRedis::start_with(options.as_flattened()) else { return };
        let url = format!("rediss://localhost:{port}");
        let connect = async |authority: &str| {
            let address = RedisAddress::new(&url, None, Some(authority.as_bytes())).unwrap();
            RateServer::new(address, "test".to_owned()).connect().await
        };
        let connected = connect(&authority).await;
        assert_eq!(connected.is_ok(), is_right, "{name}: {connected:?}");
        let error = connect(&certificate(name).0).await.unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
    }
}
